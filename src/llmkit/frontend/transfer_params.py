"""`kv_transfer_params`: what a client sends along for the connector."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from llmkit.errors import InvalidRequestError, described

MAX_CHARS = 1 << 20
"""More than the ids of all blocks of the longest sequences."""


def checked_transfer_params(value: Any) -> dict[str, Any] | None:
    """A copy of `value`. What its fields mean is the connector's to check.

    Raises InvalidRequestError if it is not a JSON object, too long a one, or one with integers of more than 64 bits,
    which no message to an engine process can hold."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _refused(f"got {type(value).__name__}")
    try:
        text = json.dumps(dict(value), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _refused(described(error)) from error
    if len(text) > MAX_CHARS:
        raise _refused(f"it has {len(text)} characters, and may have {MAX_CHARS}")
    copy: dict[str, Any] = json.loads(text)
    try:
        msgspec.msgpack.encode(copy)
    except OverflowError:
        raise _refused("it has an integer of more than 64 bits") from None
    return copy


def _refused(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"kv_transfer_params must be a JSON object: {why}.", param="kv_transfer_params")
