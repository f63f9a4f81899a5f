"""Commands are listed from metadata and imported when they are run."""

from __future__ import annotations

import sys
from typing import Any

import typer

from llmkit.registry import Registry


def test_command_is_imported_when_it_is_run(site: Any, cpu: Any) -> None:
    site.add_module(
        "hello_command",
        """
        import typer
        from llmkit.hookspecs import PluginInfo, hookimpl

        info = PluginInfo("says hello")

        @hookimpl
        def llmkit_command():
            return typer.Typer(name="hello")
    """,
    )
    site.add_distribution("llmkit-hello", {"llmkit.commands": {"hello": "hello_command"}})
    registry = Registry.discover()
    (row,) = registry.find("command")
    assert (row.name, row.distribution) == ("hello", "llmkit-hello")
    assert "hello_command" not in sys.modules
    assert isinstance(registry.create("command", "hello", cpu), typer.Typer)
