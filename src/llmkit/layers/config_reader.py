"""Checked access to the keys of a Hugging Face `config.json`: a bad value is one sentence that names the key."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from llmkit.errors import ModelError, shown

MAX_INTEGER = 2**31 - 1


class ConfigReader:
    """Reads `raw`; `where` prefixes the key in messages. A null counts as missing.

    Every method raises ModelError for a value of the wrong type or outside the range, and for a missing key
    without a default.
    """

    def __init__(self, raw: Mapping[str, Any], where: str = "") -> None:
        self.raw = raw
        self._where = where

    def has(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def bad(self, key: str, expected: str) -> ModelError:
        """The error for a present but unusable value."""
        return ModelError(
            f"The model's config.json has {self._where}{key} = {shown(self.raw.get(key))}; it must be {expected}."
        )

    def missing(self, key: str) -> ModelError:
        return ModelError(f"The model's config.json lacks {self._where}{key}.")

    def integer(self, key: str, *, minimum: int = 1, maximum: int = MAX_INTEGER) -> int:
        value = self.raw.get(key)
        if value is None:
            raise self.missing(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.bad(key, f"an integer of at least {minimum}")
        if value > maximum:
            raise self.bad(key, f"an integer of at most {maximum}")
        return value

    def integer_or(self, key: str, default: int, *, minimum: int = 1) -> int:
        return self.integer(key, minimum=minimum) if self.has(key) else default

    def optional_integer(self, key: str, *, minimum: int = 1) -> int | None:
        return self.integer(key, minimum=minimum) if self.has(key) else None

    def number(self, key: str, *, above: float = 0.0) -> float:
        value = self.raw.get(key)
        if value is None:
            raise self.missing(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < math.inf:
            raise self.bad(key, f"a number greater than {above:g}")
        return float(value)

    def number_or(self, key: str, default: float, *, above: float = 0.0) -> float:
        return self.number(key, above=above) if self.has(key) else default

    def optional_number(self, key: str, *, above: float = 0.0) -> float | None:
        return self.number(key, above=above) if self.has(key) else None

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers of at least 0; empty if the key is missing."""
        value = self.raw.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(
            isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value
        ):
            raise self.bad(key, "a list of integers of at least 0")
        return tuple(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of `count` numbers greater than 0."""
        value = self.raw.get(key)
        if value is None:
            raise self.missing(key)
        is_list = isinstance(value, list | tuple) and len(value) == count
        if not is_list or not all(
            isinstance(v, int | float) and not isinstance(v, bool) and 0 < v < math.inf for v in value
        ):
            raise self.bad(key, f"a list of {count} numbers greater than 0")
        return tuple(float(v) for v in value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.bad(key, "true or false")
        return value

    def text(self, key: str, default: str, allowed: Sequence[str] = ()) -> str:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or (allowed and value not in allowed):
            raise self.bad(key, f"one of {', '.join(allowed)}" if allowed else "a text")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.raw.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.bad(key, "an object")
        return value
