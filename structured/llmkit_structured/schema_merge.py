"""Intersection of two forms: `allOf`, and keywords beside one another."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import TypeVar

from llmkit.grammars.effort import spend
from llmkit_structured.schema_form import (
    ANY,
    NOTHING,
    Array,
    Definitions,
    Form,
    Literal,
    Number,
    Object,
    Reference,
    String,
    Union,
    accepts,
    union,
)

MAX_OPTIONS = 256
MAX_DEPTH = 64
MAX_WORK = 100_000
T = TypeVar("T")


class TooManyOptions(ValueError):
    """The intersection has more alternatives, or nests deeper, than is sensible."""


_work = threading.local()


@contextmanager
def limited_work() -> Iterator[None]:
    """Within it, this thread intersects MAX_WORK times at most; then TooManyOptions."""
    _work.left = MAX_WORK
    try:
        yield
    finally:
        _work.left = None


def _spend() -> None:
    spend()
    left = getattr(_work, "left", None)
    if left is not None:
        if left <= 0:
            raise TooManyOptions("alternatives that multiply to too many")
        _work.left = left - 1


def intersect(one: Form, other: Form, definitions: Definitions, depth: int = 0) -> Form:
    """The values that are of both forms. Properties keep the order of `one`, then of `other`. Raises TooManyOptions."""
    if depth > MAX_DEPTH:
        raise TooManyOptions("alternatives that nest too deeply")
    _spend()
    if one in (other, ANY) or other == NOTHING:
        return other
    if other == ANY or one == NOTHING:
        return one
    if isinstance(one, Reference):
        return intersect(definitions[one.name], other, definitions, depth + 1)
    if isinstance(other, Reference):
        return intersect(one, definitions[other.name], definitions, depth + 1)
    if isinstance(one, Union) or isinstance(other, Union):
        pairs = [(a, b) for a in _options(one) for b in _options(other)]
        if len(pairs) > MAX_OPTIONS**2:
            raise TooManyOptions("alternatives that multiply to too many")
        found = union([intersect(a, b, definitions, depth + 1) for a, b in pairs])
        if len(_options(found)) > MAX_OPTIONS:
            raise TooManyOptions("alternatives that multiply to too many")
        return found
    if isinstance(one, Literal):
        return one if accepts(other, one.value, definitions) else NOTHING
    if isinstance(other, Literal):
        return other if accepts(one, other.value, definitions) else NOTHING
    if isinstance(one, Number) and isinstance(other, Number):
        return _numbers(one, other)
    if isinstance(one, String) and isinstance(other, String):
        patterns = tuple(dict.fromkeys(one.patterns + other.patterns))
        return String(max(one.low, other.low), _least(one.high, other.high), patterns)
    if isinstance(one, Array) and isinstance(other, Array):
        return _arrays(one, other, definitions, depth + 1)
    if isinstance(one, Object) and isinstance(other, Object):
        return _objects(one, other, definitions, depth + 1)
    return one if type(one) is type(other) else NOTHING


def _options(form: Form) -> tuple[Form, ...]:
    return form.options if isinstance(form, Union) else (form,)


def _least(one: T | None, other: T | None, smaller: Callable[..., T] = min) -> T | None:
    given = [value for value in (one, other) if value is not None]
    return smaller(given) if given else None


def _numbers(one: Number, other: Number) -> Number:
    low, high = _least(one.low, other.low, max), _least(one.high, other.high)
    multiples = {n.multiple_of for n in (one, other) if n.multiple_of is not None}
    return Number(
        low,
        high,
        any(n.low_open and n.low == low for n in (one, other)),
        any(n.high_open and n.high == high for n in (one, other)),
        one.integer or other.integer,
        _common_multiple(multiples),
    )


def _common_multiple(steps: set[Decimal]) -> Decimal | None:
    from math import gcd, lcm

    if len(steps) < 2:
        return next(iter(steps), None)
    ratios = [step.as_integer_ratio() for step in steps]
    # Of decimal fractions in lowest terms: the least common multiple is again a decimal fraction.
    return Decimal(lcm(*(n for n, _ in ratios))) / Decimal(gcd(*(d for _, d in ratios)))


def _arrays(one: Array, other: Array, definitions: Definitions, depth: int) -> Form:
    longest = max(len(one.prefix), len(other.prefix))
    prefix = tuple(intersect(_item(one, i), _item(other, i), definitions, depth) for i in range(longest))
    rest = intersect(_item(one, longest), _item(other, longest), definitions, depth)
    return Array(
        prefix,
        None if rest == ANY else rest,
        max(one.low, other.low),
        _least(one.high, other.high),
        one.unique or other.unique,
    )


def _item(array: Array, index: int) -> Form:
    if index < len(array.prefix):
        return array.prefix[index]
    return ANY if array.rest is None else array.rest


def _objects(one: Object, other: Object, definitions: Definitions, depth: int) -> Form:
    names = dict.fromkeys([name for name, _ in one.properties] + [name for name, _ in other.properties])
    rest = intersect(one.form_of_others(), other.form_of_others(), definitions, depth)
    return Object(
        tuple((name, intersect(one.form_of(name), other.form_of(name), definitions, depth)) for name in names),
        tuple(dict.fromkeys(one.required + other.required)),
        None if rest == ANY else rest,
        one.open_by_silence or other.open_by_silence,
        max(one.low, other.low),
        _least(one.high, other.high),
    )


def literal(value: object) -> Literal:
    """The form of one JSON value."""
    return Literal(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
