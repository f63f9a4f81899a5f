"""How the command line tells of an error."""

from __future__ import annotations

import typer


def print_error(message: str) -> None:
    """Print one paragraph on stderr, whatever line breaks `message` has."""
    typer.secho("llmkit: ", fg=typer.colors.RED, bold=True, nl=False, err=True)
    typer.echo(" ".join(message.split()), err=True)
