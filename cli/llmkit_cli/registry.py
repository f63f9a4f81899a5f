"""Which subcommands there are: llmkit's own, and plugins of kind `command`. Nothing is imported before it is run."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from llmkit.registry import Registry


@dataclass(frozen=True)
class BuiltinCommand:
    """A subcommand of llmkit itself: the module that holds its Typer app, and the line `--help` shows."""

    module: str
    summary: str


BUILTIN_COMMANDS: dict[str, BuiltinCommand] = {
    "generate": BuiltinCommand("llmkit_cli.commands.generate", "Generate text for one or more prompts."),
    "chat": BuiltinCommand("llmkit_cli.commands.chat", "Talk to a model in the terminal."),
    "complete": BuiltinCommand("llmkit_cli.commands.complete", "Go on with texts typed into the terminal."),
    "run-batch": BuiltinCommand("llmkit_cli.commands.run_batch", "Answer the requests of an OpenAI batch file."),
    "serve": BuiltinCommand("llmkit_cli.commands.serve", "Serve a model over HTTP, with the API of OpenAI."),
    "plugins": BuiltinCommand("llmkit_cli.commands.plugins", "List, inspect, check and begin plugins."),
    "config": BuiltinCommand("llmkit_cli.commands.config", "Show every setting and where its value comes from."),
    "models": BuiltinCommand("llmkit_cli.commands.models", "Fetch and list models."),
    "bench": BuiltinCommand("llmkit_cli.commands.bench", "Measure throughput, latency, start-up and servers."),
    "profile": BuiltinCommand("llmkit_cli.commands.profile", "Record where the time of an engine's steps goes."),
    "collect-env": BuiltinCommand("llmkit_cli.commands.collect_env", "Print what a bug report needs."),
}


def plugin_commands() -> dict[str, str]:
    """Names of installed plugin commands → a line for the help; read from metadata, nothing is imported."""
    rows = [row for row in discover().find("command") if row.state != "disabled"]
    return {row.name: f"From the package {row.distribution}." for row in rows if row.name not in BUILTIN_COMMANDS}


def discover() -> Registry:
    """The registry as the environment configures it, `LLMKIT_SAFE_MODE` and `LLMKIT_DISABLE_PLUGINS` among others.

    Reading the configuration takes a while, so it is done only where a plugin command is installed at all.
    """
    from llmkit.registry import Registry

    registry = Registry.discover()
    if not registry.find("command"):
        return registry
    from llmkit.config import load_config

    return Registry.discover(load_config().config.plugins)


def load_command(name: str) -> typer.Typer | None:
    """The Typer app of a subcommand, None if there is no such command. Raises PluginError if a plugin is broken."""
    builtin = BUILTIN_COMMANDS.get(name)
    if builtin is not None:
        app = importlib.import_module(builtin.module).app
        assert isinstance(app, typer.Typer)
        return app
    if name not in plugin_commands():
        return None
    from llmkit.registry import detect_environment

    plugin_app = discover().create("command", name, detect_environment())
    assert isinstance(plugin_app, typer.Typer)
    return plugin_app
