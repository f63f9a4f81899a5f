"""`llmkit config show`: every setting, its value and where that comes from."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from llmkit_cli.engine_options import ALL_OPTIONS, loaded_config
from llmkit_cli.signature import LongHelp, with_options

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True, help="Show the configuration."
)


@app.callback()
def config() -> None:
    """Show the configuration."""


@app.command(cls=LongHelp)
@with_options(ALL_OPTIONS)
def show(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    *,
    engine: dict[str, Any],
) -> None:
    """Print every setting with its value and its source: flag, environment, a line of the file, or default."""
    loaded = loaded_config(engine)
    rows = [{"key": s.key, "value": s.value, "source": s.source} for s in loaded.settings()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2, default=str))
        return
    width = max(len(row["key"]) for row in rows)
    for row in rows:
        typer.echo(f"{row['key']:<{width}}  {json.dumps(row['value'], default=str):<16}  {row['source']}")
