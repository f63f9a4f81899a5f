"""JSON schemas in a form without overlap: each node says one thing, and a value is one of a node's options.

`schema_reader` makes it; engines turn it into what they understand, or refuse what they have no means for. Nothing here
is lost on the way: a form describes exactly the values that its schema allows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from llmkit.grammars.effort import spend
from llmkit_structured.regex_match import matches
from llmkit_structured.regex_tree import Tree


@dataclass(frozen=True)
class Null:
    """null."""


@dataclass(frozen=True)
class Boolean:
    """true or false."""


@dataclass(frozen=True)
class Number:
    """A number from `low` to `high` (None: no bound); open: the bound itself is excluded. integer: whole numbers only.
    multiple_of: None or what it is divisible by."""

    low: Decimal | None = None
    high: Decimal | None = None
    low_open: bool = False
    high_open: bool = False
    integer: bool = False
    multiple_of: Decimal | None = None


@dataclass(frozen=True)
class Pattern:
    """A language of strings: `tree` holds the whole strings. keyword, source: where it comes from, for messages."""

    tree: Tree
    keyword: str = field(compare=False)
    source: str = field(compare=False)


@dataclass(frozen=True)
class String:
    """A string of `low` to `high` characters (None: no bound) in each of `patterns`."""

    low: int = 0
    high: int | None = None
    patterns: tuple[Pattern, ...] = ()


@dataclass(frozen=True)
class Array:
    """`low` to `high` items: the first ones as `prefix` says, the others as `rest` does. unique: no two are equal."""

    prefix: tuple[Form, ...] = ()
    rest: Form | None = None
    low: int = 0
    high: int | None = None
    unique: bool = False

    def form_of_others(self) -> Form:
        """What an item behind the prefix must be."""
        return ANY if self.rest is None else self.rest


@dataclass(frozen=True)
class Object:
    """`properties` in their order, `rest` for all other names (None: anything).

    open_by_silence: nothing was said of other names, so an engine may leave them out. low, high: number of properties.
    """

    properties: tuple[tuple[str, Form], ...] = ()
    required: tuple[str, ...] = ()
    rest: Form | None = None
    open_by_silence: bool = False
    low: int = 0
    high: int | None = None

    def form_of(self, name: str) -> Form:
        """What a property called `name` must be."""
        return dict(self.properties).get(name, self.form_of_others())

    def form_of_others(self) -> Form:
        """What a property of another name must be."""
        return ANY if self.rest is None else self.rest


@dataclass(frozen=True)
class Literal:
    """One value, as JSON text."""

    text: str

    @property
    def value(self) -> Any:
        return json.loads(self.text)


@dataclass(frozen=True)
class Union:
    """One of `options`; none: no value at all."""

    options: tuple[Form, ...]


@dataclass(frozen=True)
class Reference:
    """The form of that name among the definitions."""

    name: str


Form = Null | Boolean | Number | String | Array | Object | Literal | Union | Reference
Definitions = Mapping[str, Form]

ANY = Union((Null(), Boolean(), Number(), String(), Array(), Object()))
NOTHING = Union(())


def union(options: list[Form]) -> Form:
    """One of `options`, flat, without duplicates."""
    flat: dict[Form, None] = {}
    for option in options:
        flat.update(dict.fromkeys(option.options if isinstance(option, Union) else (option,)))
    return next(iter(flat)) if len(flat) == 1 else Union(tuple(flat))


def equal(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same: 1 is 1.0 and is not true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    return bool(one == other)


def accepts(form: Form, value: Any, definitions: Definitions) -> bool:
    """Whether the JSON value `value` is of `form`."""
    spend()
    if isinstance(form, Reference):
        return accepts(definitions[form.name], value, definitions)
    if isinstance(form, Union):
        return any(accepts(option, value, definitions) for option in form.options)
    if isinstance(form, Literal):
        return equal(form.value, value)
    if isinstance(form, Null):
        return value is None
    if isinstance(form, Boolean):
        return isinstance(value, bool)
    if isinstance(form, Number):
        return isinstance(value, (int, float)) and not isinstance(value, bool) and _accepts_number(form, value)
    if isinstance(form, String):
        return isinstance(value, str) and _accepts_string(form, value)
    if isinstance(form, Array):
        return isinstance(value, list) and _accepts_array(form, value, definitions)
    return isinstance(value, dict) and _accepts_object(form, value, definitions)


def _accepts_number(form: Number, value: float) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        return False
    exact = exact_number(value)
    if form.low is not None and (exact < form.low or (form.low_open and exact == form.low)):
        return False
    if form.high is not None and (exact > form.high or (form.high_open and exact == form.high)):
        return False
    if form.integer and exact != exact.to_integral_value():
        return False
    return form.multiple_of is None or is_multiple(exact, form.multiple_of)


def exact_number(value: float) -> Decimal:
    """A JSON number as it is written, without the rounding of binary fractions."""
    return Decimal(value) if isinstance(value, int) else Decimal(repr(value))


def is_multiple(value: Decimal, step: Decimal) -> bool:
    """Whether `value` is a whole multiple of `step`, without rounding."""
    (a, b), (c, d) = value.as_integer_ratio(), step.as_integer_ratio()
    return (a * d) % (b * c) == 0


def _accepts_string(form: String, value: str) -> bool:
    if len(value) < form.low or (form.high is not None and len(value) > form.high):
        return False
    return all(matches(pattern.tree, value) for pattern in form.patterns)


def _accepts_array(form: Array, value: list[Any], definitions: Definitions) -> bool:
    if len(value) < form.low or (form.high is not None and len(value) > form.high):
        return False
    if form.unique and any(equal(a, b) for i, a in enumerate(value) for b in value[:i]):
        return False
    rest = ANY if form.rest is None else form.rest
    forms = [*form.prefix, *[rest] * max(0, len(value) - len(form.prefix))]
    return all(accepts(one, item, definitions) for one, item in zip(forms, value, strict=False))


def _accepts_object(form: Object, value: dict[str, Any], definitions: Definitions) -> bool:
    if len(value) < form.low or (form.high is not None and len(value) > form.high):
        return False
    if any(name not in value for name in form.required):
        return False
    return all(accepts(form.form_of(name), item, definitions) for name, item in value.items())
