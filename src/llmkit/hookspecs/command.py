"""Kind `command`: a subcommand of the `llmkit` command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmkit.hookspecs.markers import hookspec

if TYPE_CHECKING:
    import typer


@hookspec(firstresult=True)
def llmkit_command() -> typer.Typer:  # type: ignore[empty-body]
    """The Typer app that is mounted under the entry point's name; imported only when that subcommand is run.

    .. versionadded:: 0.1
    """
