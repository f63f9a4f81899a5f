"""Flags of commands that can talk to a running server instead of building an engine."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from llmkit.errors import ConfigError
from llmkit_cli.engine_options import given_flags
from llmkit_cli.signature import OptionGroup

PANEL = "Running server"

ApiKey = Annotated[
    str | None,
    typer.Option(envvar="OPENAI_API_KEY", help="Key for the server.", rich_help_panel=PANEL, show_default=False),
]

REMOTE_OPTIONS = OptionGroup(
    "remote",
    {
        "url": (
            Annotated[
                str | None,
                typer.Option(
                    help="Talk to the OpenAI-compatible server at this address, such as http://127.0.0.1:8000; --model "
                    "is then a name that it serves, by default its first one.",
                    rich_help_panel=PANEL,
                ),
            ],
            None,
        ),
        "api_key": (ApiKey, None),
    },
)


def remote_model(engine: dict[str, Any]) -> str | None:
    """The name given with --model. Raises ConfigError for flags of an engine, which a running server would ignore."""
    given = set(given_flags(engine)) - {"model.model"}
    given |= {name for name in ("config", "settings", "dry_run") if engine[name]}
    if given:
        raise ConfigError(f"--url talks to a server that runs: {', '.join(sorted(given))} cannot be set with it.")
    model: str | None = engine["model__model"]
    return model
