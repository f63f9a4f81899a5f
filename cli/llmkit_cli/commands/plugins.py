"""`llmkit plugins`: what is installed, what one plugin is, and whether each can be used here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from llmkit.registry import Registry

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="List, inspect and check plugins.",
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SafeModeOption = Annotated[bool, typer.Option("--safe-mode", help="Ignore every third-party distribution.")]


def discover(safe_mode: bool) -> Registry:
    from llmkit.config import load_config
    from llmkit.registry import Registry

    flags = {"plugins.safe_mode": True} if safe_mode else {}
    return Registry.discover(load_config(flags=flags).config.plugins)
