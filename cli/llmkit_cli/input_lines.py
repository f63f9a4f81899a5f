"""Lines of the standard input that are answered one by one, and the status that the command ends with."""

from __future__ import annotations

import io
import sys

import typer

from llmkit.errors import InvalidRequestError


def next_line() -> str | None:
    """The next line, asked for in a terminal; None at the end of input. Bytes that are no text are in it as lone
    surrogates, for `check_text` to refuse: further lines can still be read."""
    if isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.errors != "surrogateescape":
        sys.stdin.reconfigure(errors="surrogateescape")
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def check_text(line: str) -> None:
    """Raises InvalidRequestError for a line with bytes that are no text in the encoding of the input."""
    if any("\udc80" <= character <= "\udcff" for character in line):
        encoding = (sys.stdin.encoding or "utf-8").upper()
        raise InvalidRequestError(f"A line of the input is not {encoding} text.")


def end(all_answered: bool) -> None:
    """Leave with status 1 if an answer failed and no person was there to see it."""
    if not all_answered and not sys.stdin.isatty():
        raise typer.Exit(1)
