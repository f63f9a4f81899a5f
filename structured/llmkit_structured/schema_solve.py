"""What can be decided of forms: whether one is empty, whether two have a value in common, what the opposite is."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR

from llmkit.grammars.effort import spend
from llmkit_structured.schema_form import (
    Array,
    Definitions,
    Form,
    Number,
    Object,
    Reference,
    String,
    Union,
    union,
)
from llmkit_structured.schema_merge import TooManyOptions, intersect

_DEPTH = 24


def disjoint(one: Form, other: Form, definitions: Definitions) -> bool:
    """Whether it is certain that no value is of both forms."""
    try:
        return is_empty(intersect(one, other, definitions), definitions)
    except TooManyOptions:
        return False


def without_empty(form: Form) -> Form:
    """`form` without the alternatives that no value meets."""
    if isinstance(form, Reference):
        return form
    return union([one for one in (form.options if isinstance(form, Union) else (form,)) if not is_empty(one, {})])


def is_empty(form: Form, definitions: Definitions, depth: int = 0) -> bool:
    """Whether it is certain that no value is of the form. References that are not among `definitions` are taken for
    having one."""
    spend()
    if depth > _DEPTH or (isinstance(form, Reference) and form.name not in definitions):
        return False
    if isinstance(form, Union):
        return all(is_empty(option, definitions, depth + 1) for option in form.options)
    if isinstance(form, Reference):
        return is_empty(definitions[form.name], definitions, depth + 1)
    if isinstance(form, Number):
        return _no_number(form)
    if isinstance(form, (String, Array)) and form.high is not None and form.low > form.high:
        return True
    if isinstance(form, Array):
        needed = [*form.prefix, *([form.rest] if form.rest is not None and form.low > len(form.prefix) else [])]
        return any(is_empty(item, definitions, depth + 1) for item in needed[: form.low])
    if isinstance(form, Object):
        if form.high is not None and (form.low > form.high or len(form.required) > form.high):
            return True
        return any(is_empty(form.form_of(name), definitions, depth + 1) for name in form.required)
    return False


def _no_number(form: Number) -> bool:
    if form.low is None or form.high is None:
        return False
    if form.integer:
        low, high = whole_bounds(form)
        return low is not None and high is not None and low > high
    return form.low > form.high or (form.low == form.high and (form.low_open or form.high_open))


def whole_bounds(form: Number) -> tuple[int | None, int | None]:
    """Least and greatest whole number between the bounds, both included; None: no bound."""
    low = high = None
    if form.low is not None:
        low = int(form.low.to_integral_value(ROUND_CEILING))
        low += form.low_open and low == form.low
    if form.high is not None:
        high = int(form.high.to_integral_value(ROUND_FLOOR))
        high -= form.high_open and high == form.high
    return low, high


def children(form: Form) -> Iterator[Form]:
    """The forms that `form` is built of."""
    if isinstance(form, Union):
        yield from form.options
    elif isinstance(form, Array):
        yield from form.prefix
        if form.rest is not None:
            yield form.rest
    elif isinstance(form, Object):
        yield from (of for _, of in form.properties)
        if form.rest is not None:
            yield form.rest


def recursive_names(definitions: Definitions) -> frozenset[str]:
    """The definitions that refer to themselves, directly or through others."""
    refers = {name: set(_references(form)) for name, form in definitions.items()}
    return frozenset(name for name in refers if name in _reached(refers, name))


def _references(form: Form) -> Iterator[str]:
    if isinstance(form, Reference):
        yield form.name
    for child in children(form):
        yield from _references(child)


def _reached(refers: dict[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    stack = list(refers[start])
    while stack:
        name = stack.pop()
        if name not in reached:
            reached.add(name)
            stack.extend(refers[name])
    return reached
