"""Checks of single request fields: each returns the normalised value or raises InvalidRequestError."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

from llmkit.errors import InvalidRequestError, shown


def refuse(param: str, value: object, allowed: str) -> InvalidRequestError:
    """The error for `value` of field `param`; `allowed` says what would be right; long values are cut."""
    return InvalidRequestError(f"{param} must be {allowed}, got {shown(value)}.", param=param)


def integer(param: str, value: Any, low: int | None = None, high: int | None = None, allowed: str | None = None) -> int:
    """An int within low..high. True and False are no integers; numpy integers are. allowed: words for the range, where
    there is more to say."""
    allowed = allowed or _integer_range(low, high)
    if isinstance(value, bool):
        raise refuse(param, value, allowed)
    try:
        number = operator.index(value)
    except Exception:  # TypeError, or whatever the value's own method raises
        raise refuse(param, value, allowed) from None
    if (low is not None and number < low) or (high is not None and number > high):
        raise refuse(param, value, allowed)
    return number


def _integer_range(low: int | None, high: int | None) -> str:
    if high is None:
        return "an integer" if low is None else f"an integer of at least {low}"
    return f"an integer from {low} to {high}"


def number(param: str, value: Any, allowed: str, low: float, high: float, *, open_low: bool = False) -> float:
    """A finite float within low..high (low itself excluded with `open_low`); `allowed` words the range."""
    if isinstance(value, (bool, str, bytes, bytearray)) or type(value).__name__ in ("bool", "bool_"):  # numpy's
        raise refuse(param, value, allowed)
    try:
        result = float(value)
    except Exception:  # TypeError, ValueError, OverflowError, or whatever the value's own method raises
        raise refuse(param, value, allowed) from None
    if not math.isfinite(result) or not low <= result <= high or (open_low and result == low):
        raise refuse(param, value, allowed)
    return result


def flag(param: str, value: Any) -> bool:
    """A bool, and nothing that merely looks like one."""
    if not isinstance(value, bool):
        raise refuse(param, value, "true or false")
    return value


def strings(param: str, value: Any, limit: int, max_chars: int, max_total: int) -> tuple[str, ...]:
    """One string or several as a tuple without doubles; at most `limit`, none empty or of more than `max_chars`
    characters, together of at most `max_total`."""
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) else _items(param, value, "a string or a list of strings")
    if len(items) > limit:
        raise InvalidRequestError(f"{param} may hold at most {limit} strings, got {len(items)}.", param=param)
    for item in items:
        if not isinstance(item, str):
            raise refuse(param, item, "a string or a list of strings")
        if not item:
            raise InvalidRequestError(f"{param} must not contain an empty string.", param=param)
        if len(item) > max_chars:
            raise InvalidRequestError(
                f"{param} may hold strings of at most {max_chars} characters, got one of {len(item)}.",
                param=param,
            )
    total = sum(map(len, items))
    if total > max_total:
        raise InvalidRequestError(f"{param} may hold at most {max_total} characters in all, got {total}.", param=param)
    return tuple(dict.fromkeys(items))


def token_ids(param: str, value: Any, limit: int) -> tuple[int, ...]:
    """Token ids, each >= 0, as a tuple without doubles; at most `limit`. The vocabulary is checked elsewhere."""
    if value is None:
        return ()
    items = _items(param, value, "a list of token ids")
    if len(items) > limit:
        raise InvalidRequestError(f"{param} may hold at most {limit} ids, got {len(items)}.", param=param)
    return tuple(dict.fromkeys(integer(param, item, 0, 2**31 - 1) for item in items))


def integers(param: str, value: Any, allowed: str, low: int, high: int) -> list[int]:
    """Any number of integers, each within low..high; `allowed` words what they are."""
    return [integer(param, item, low, high) for item in _items(param, value, allowed)]


def logit_bias(param: str, value: Any, limit: int) -> dict[int, float] | None:
    """Token id → bias in -100..100. Keys may be strings of digits, as in JSON. Empty becomes None."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise refuse(param, value, "a mapping from token id to a number from -100 to 100")
    if len(value) > limit:
        raise InvalidRequestError(f"{param} may hold at most {limit} ids, got {len(value)}.", param=param)
    result: dict[int, float] = {}
    for key, bias in value.items():
        if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10:
            key = int(key)
        token = integer(param, key, 0, 2**31 - 1)
        result[token] = number(param, bias, f"for token {token} a number from -100 to 100", -100.0, 100.0)
    return result or None


def _items(param: str, value: Any, allowed: str) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise refuse(param, value, allowed)
    try:
        return tuple(value)
    except Exception:  # an iterator's own
        raise refuse(param, value, allowed) from None
