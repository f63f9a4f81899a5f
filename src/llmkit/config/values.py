"""Values given as text, by flags and environment variables."""

from __future__ import annotations

import json
import tomllib
from typing import Any

from llmkit.config.flags import Flag
from llmkit.errors import ConfigError, shown

UNREADABLE = (ValueError, RecursionError)
"""What the parsers of JSON and TOML raise: also for integers of thousands of digits, and where nesting is too deep."""


def parse_text(flag: Flag, text: str) -> Any:
    """`text` as a value of the setting. Scalars are left to the model's own conversion ("64" → 64, "no" → False);
    "null" leaves an optional setting open. Raises ConfigError for a malformed list or table."""
    if flag.optional and text.lower() == "null":
        return None
    if flag.type == "list" and not text.lstrip().startswith("["):
        return [item.strip() for item in text.split(",") if item.strip()]
    if flag.type in ("list", "table"):
        try:
            return json.loads(text)
        except UNREADABLE as error:
            given = "what was given" if flag.secret else shown(text)
            raise ConfigError(f"{flag.key} must be {flag.allowed}, as JSON; {given} is not: {reason(error)}.") from None
    return text


def parse_literal(text: str) -> Any:
    """`text` as a TOML value or JSON literal if it is one, else as itself: `10` → 10, `[1]` → a list, `fast` → text."""
    if "\n" not in text:
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except UNREADABLE:
            pass
        else:
            # Dates are TOML but not JSON; no option could be given one in YAML or by a child process.
            return value if isinstance(value, str | int | float | bool | list | dict) else text
    try:
        return json.loads(text)
    except UNREADABLE:
        return text


def reason(error: Exception) -> str:
    """Why something could not be read, in one line without a full stop."""
    return "too deeply nested" if isinstance(error, RecursionError) else " ".join(str(error).split()).rstrip(".")


def split_setting(text: str) -> tuple[str, str]:
    """`KEY=VALUE` of `--set` → (key, value text). Raises ConfigError if there is no `=` or no key."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            f"--set {shown(text)} is not of the form KEY=VALUE.",
            hint="For example --set scheduler.max_num_seqs=64, or KIND.NAME.OPTION=VALUE for a plugin.",
        )
    return key.strip(), value.strip()
