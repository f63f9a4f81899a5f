"""Flags that constrain the answer, and what they become in SamplingParams."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from llmkit.errors import InvalidRequestError
from llmkit_cli.signature import OptionGroup

PANEL = "Structured output"

STRUCTURED_OPTIONS = OptionGroup(
    "constraint",
    {
        "json_schema": (
            Annotated[
                Path | None,
                typer.Option(metavar="FILE", help="The answer is JSON that meets this schema.", rich_help_panel=PANEL),
            ],
            None,
        ),
        "json_object": (
            Annotated[bool, typer.Option("--json-object", help="The answer is a JSON object.", rich_help_panel=PANEL)],
            False,
        ),
        "regex": (
            Annotated[
                str | None, typer.Option(help="The answer matches this expression as a whole.", rich_help_panel=PANEL)
            ],
            None,
        ),
        "choice": (
            Annotated[
                list[str] | None,
                typer.Option(help="The answer is this text, or another one given so.", rich_help_panel=PANEL),
            ],
            None,
        ),
        "grammar": (
            Annotated[
                Path | None,
                typer.Option(
                    metavar="FILE", help="The answer is a text of this grammar, EBNF or Lark.", rich_help_panel=PANEL
                ),
            ],
            None,
        ),
    },
)


def structured_outputs(constraint: dict[str, Any]) -> dict[str, Any] | None:
    """The field of SamplingParams; None if no flag was given. Raises InvalidRequestError for a file that cannot be
    read; more than one constraint is refused where the parameters are made."""
    files = {"json": constraint["json_schema"], "grammar": constraint["grammar"]}
    given: dict[str, Any] = {name: _read(file) for name, file in files.items() if file is not None}
    given |= {name: constraint[name] for name in ("json_object", "regex", "choice") if constraint[name]}
    return given or None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{file} cannot be read: {error}.") from error
