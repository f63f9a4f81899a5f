"""The table of plugin kinds: entry-point group, hook, configuration key and flag of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmkit.hookspecs import (
    attention,
    command,
    connector,
    executor,
    extension,
    kernels,
    model,
    quantization,
    reasoning_parser,
    scheduler,
    structured,
    tool_parser,
    weights,
)


@dataclass(frozen=True)
class PluginKind:
    """One kind of plugin.

    name: as in `llmkit plugins inspect NAME:…`. group: the entry-point group. hooks: the one that builds the object;
    of observers all there are. config_key: dotted configuration key that selects one, None where the core looks
    plugins up by other means (subcommand). flag: its command-line flag. optional_hooks: what a plugin may implement
    besides. auto_by_model: what "auto" means depends on the model that is run.
    """

    name: str
    group: str
    summary: str
    hooks: tuple[Callable[..., Any], ...]
    config_key: str | None = None
    flag: str | None = None
    many: bool = False
    optional_hooks: tuple[Callable[..., Any], ...] = ()
    auto_by_model: bool = False


KINDS: tuple[PluginKind, ...] = (
    PluginKind(
        "scheduler",
        "llmkit.schedulers",
        "order of the waiting queue, victims, admission, chunking",
        (scheduler.llmkit_scheduler_policy,),
        "scheduler.policy",
        "--scheduler",
    ),
    PluginKind(
        "attention",
        "llmkit.attention_backends",
        "paged attention over the KV cache",
        (attention.llmkit_attention_backend,),
        "attention.backend",
        "--attention",
    ),
    PluginKind(
        "connector",
        "llmkit.connectors",
        "KV blocks moved to and from other places",
        (connector.llmkit_connector,),
        "connector.name",
        "--connector",
    ),
    PluginKind(
        "structured",
        "llmkit.structured",
        "grammar engines for structured output",
        (structured.llmkit_grammar_compiler,),
        "structured.backend",
        "--structured",
    ),
    PluginKind(
        "model",
        "llmkit.models",
        "model architectures, by the name in config.json",
        (model.llmkit_model,),
        "model.implementation",
        "--model-impl",
        optional_hooks=(model.llmkit_model_support, model.llmkit_model_config, model.llmkit_model_example),
        auto_by_model=True,
    ),
    PluginKind(
        "executor",
        "llmkit.executors",
        "how workers are started and called",
        (executor.llmkit_executor,),
        "execution.executor",
        "--executor",
    ),
    PluginKind(
        "kernels",
        "llmkit.kernels",
        "table of fused operations",
        (kernels.llmkit_kernels,),
        "execution.kernels",
        "--kernels",
    ),
    PluginKind(
        "weights",
        "llmkit.weights",
        "file formats of models",
        (weights.llmkit_weights,),
        "model.load_format",
        "--load-format",
        auto_by_model=True,
    ),
    PluginKind(
        "quantization",
        "llmkit.quantization",
        "storage and product of linear layers' weights",
        (quantization.llmkit_quantization,),
        "model.quantization",
        "--quantization",
        auto_by_model=True,
    ),
    PluginKind(
        "tool_parser",
        "llmkit.tool_parsers",
        "formats in which models write tool calls",
        (tool_parser.llmkit_tool_format,),
        "server.tool_parser",
        "--tool-call-parser",
        optional_hooks=(tool_parser.llmkit_tool_format_fits,),
        auto_by_model=True,
    ),
    PluginKind(
        "reasoning_parser",
        "llmkit.reasoning_parsers",
        "how models mark what they think before they answer",
        (reasoning_parser.llmkit_reasoning_format,),
        "server.reasoning_parser",
        "--reasoning-parser",
        optional_hooks=(reasoning_parser.llmkit_reasoning_format_fits,),
        auto_by_model=True,
    ),
    PluginKind(
        "command",
        "llmkit.commands",
        "subcommands of the command line",
        (command.llmkit_command,),
        many=True,
    ),
    PluginKind(
        "extension",
        "llmkit.extensions",
        "observers of the engine",
        (
            extension.llmkit_engine_started,
            extension.llmkit_engine_stopped,
            extension.llmkit_step_finished,
            extension.llmkit_kv_event,
            extension.llmkit_request_finished,
            extension.llmkit_server_routes,
        ),
        "extensions",
        many=True,
    ),
)


def kind_named(name: str) -> PluginKind:
    """The kind called `name`. Raises KeyError listing the kinds there are."""
    for kind in KINDS:
        if kind.name == name:
            return kind
    raise KeyError(f"no plugin kind {name!r}; the kinds are {', '.join(k.name for k in KINDS)}")
