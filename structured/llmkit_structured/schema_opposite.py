"""The opposite of a form: for `not`, for `else`, and for alternatives of which exactly one may hold."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

from llmkit_structured.json_strings import other_names
from llmkit_structured.schema_form import (
    ANY,
    NOTHING,
    Array,
    Boolean,
    Definitions,
    Form,
    Literal,
    Null,
    Number,
    Object,
    Pattern,
    String,
    Union,
    exact_number,
    union,
)
from llmkit_structured.schema_merge import intersect, literal

_TYPES = (Null, Boolean, Number, String, Array, Object)


def complement(form: Form, definitions: Definitions) -> Form | None:
    """All values that are not of `form`; None if there is no form of them. Raises TooManyOptions."""
    options = form.options if isinstance(form, Union) else (form,)
    parts: dict[type, list[Form]] = {kind: [] for kind in _TYPES}
    for option in options:
        kind = _type_of(option)
        if kind is None:
            return None
        parts[kind].append(option)
    left: list[Form] = []
    for kind, of_type in parts.items():
        rest = _rest_of_type(kind, of_type, definitions)
        if rest is None:
            return None
        left.append(rest)
    return union(left)


def open_to_others(form: Form) -> Form:
    """A condition leaves no property out: what it does not name is not its business."""
    if isinstance(form, Union):
        return union([open_to_others(option) for option in form.options])
    return replace(form, open_by_silence=False) if isinstance(form, Object) else form


def _type_of(form: Form) -> type | None:
    """The one type that all values of `form` have, as the class of its forms; None if that is not known."""
    if not isinstance(form, Literal):
        return type(form) if isinstance(form, _TYPES) else None
    value = form.value
    if value is None:
        return Null
    if isinstance(value, bool):
        return Boolean
    if isinstance(value, (int, float)):
        return Number
    return String if isinstance(value, str) else None


def _rest_of_type(kind: type, parts: list[Form], definitions: Definitions) -> Form | None:
    """The values of one type that are of none of `parts`."""
    texts = [part.value for part in parts if isinstance(part, Literal) and kind is String]
    rest: Form = kind()
    if texts:  # one language for all of them: of several there would be no common tree
        rest = String(patterns=(Pattern(other_names(dict.fromkeys(texts)), "not", ", ".join(texts)),))
    for part in parts:
        if kind is String and isinstance(part, Literal):
            continue
        opposite = _opposite(part, definitions)
        if opposite is None:
            return None
        rest = intersect(rest, opposite, definitions)
    return rest


def _opposite(part: Form, definitions: Definitions) -> Form | None:
    """The values of the type of `part` that are not of it."""
    if isinstance(part, (Null, Boolean)):
        return NOTHING
    if isinstance(part, Literal):
        value = part.value
        if value is None or isinstance(value, bool):
            return NOTHING if value is None else literal(not value)
        return _beyond(exact_number(value), exact_number(value))
    if isinstance(part, Number):
        if part.integer or part.multiple_of is not None:
            return None
        return _beyond(part.low, part.high, part.low_open, part.high_open)
    if isinstance(part, (String, Array)):
        plain = String(part.low, part.high) if isinstance(part, String) else Array(low=part.low, high=part.high)
        if part != plain:
            return None
        shorter = [type(part)(high=part.low - 1)] if part.low else []
        return union([*shorter, *([type(part)(low=part.high + 1)] if part.high is not None else [])])
    return _other_objects(part, definitions) if isinstance(part, Object) else None


def _beyond(low: Decimal | None, high: Decimal | None, low_open: bool = False, high_open: bool = False) -> Form:
    """Numbers outside of these bounds."""
    below = [Number(high=low, high_open=not low_open)] if low is not None else []
    above = [Number(low=high, low_open=not high_open)] if high is not None else []
    return union([*below, *above])


def _other_objects(part: Object, definitions: Definitions) -> Form | None:
    """Objects that lack something required, or in which a property is not as it should be."""
    if part.rest is not None or part.low or part.high is not None:
        return None
    others: list[Form] = [Object(((name, NOTHING),)) for name in part.required]
    for name, form in part.properties:
        opposite = complement(form, definitions) if form != ANY else NOTHING
        if opposite is None:
            return None
        if opposite != NOTHING:
            others.append(Object(((name, opposite),), (name,)))
    return union(others)
