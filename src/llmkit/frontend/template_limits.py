"""How large a value a chat template may make: a template is somebody else's program, and a few characters of it can ask
for any amount of memory or time. Every operation that makes its result larger than its operands is measured first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import SecurityError

MAX_CHARACTERS = 32_000_000
"""Longest text, and most text in all that one rendering may put out; far above any context."""

MAX_ITEMS = 1_000_000
"""Most items of a list or mapping, those inside its items included."""

MAX_REPEATED = 1_000_000
"""Longest text or list that `*` may make."""

MAX_WIDTH = 10_000
"""Widest padding, and most bits of a product."""

_WIDTHS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "tojson", "truncate"})
_MEASURED = frozenset({"string", "tojson", "join", "format", "replace", "indent", "escape", "e", "forceescape"})
_WIDE_FIELD = re.compile(r"\d{5,}|%[^a-zA-Z%]*\*|:[^{}]*\{")
"""In a format: a width of five digits, or one that is an argument."""


def measured(value: Any) -> Any:
    """`value` itself. Raises SecurityError if it is too large, whatever it shares inside."""
    if isinstance(value, str):
        if len(value) > MAX_CHARACTERS:
            raise SecurityError("a text is too long.")
    elif isinstance(value, (Mapping, Sequence, set, frozenset)):
        characters(value)
    return value


def characters(value: Any) -> int:
    """About how long `value` is as text. Raises SecurityError as `measured` does; takes no longer than that."""
    total = items = 0
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, (str, bytes)):
            total += len(item)
        elif isinstance(item, int):
            total += item.bit_length() // 3 + 1
        elif isinstance(item, Mapping):
            items += len(item)
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            items += len(item)
            if items <= MAX_ITEMS:
                pending += item
        else:
            total += 1
        if total > MAX_CHARACTERS or items > MAX_ITEMS:
            raise SecurityError("a text or list is too long.")
    return total


def check_operation(operator: str, left: Any, right: Any) -> None:
    """Raises SecurityError if `left operator right` would be too large."""
    if operator == "+":
        if characters(left) + characters(right) > MAX_CHARACTERS:
            raise SecurityError("a text is too long.")
    elif operator == "%":
        if isinstance(left, str):
            check_format(left, (right,))
    elif operator == "**":
        if abs(left) > 1000 or abs(right) > 100:
            raise SecurityError("a power is too large.")
    elif _product(left, right) > MAX_REPEATED:
        raise SecurityError("a repeated text is too long.")


def _product(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return MAX_REPEATED + 1 if left.bit_length() + right.bit_length() > MAX_WIDTH else 0
    for sequence, count in ((left, right), (right, left)):
        if hasattr(sequence, "__len__") and isinstance(count, int):
            return len(sequence) * count
    return 0


def check_format(template: str, arguments: Sequence[Any]) -> None:
    """Raises SecurityError if a field of `template` may be wide, or the arguments are too large."""
    if _WIDE_FIELD.search(template):
        raise SecurityError("a format has a field of more than four digits, or one whose width is an argument.")
    fields = template.count("%") + template.count("{")
    if (len(template) + sum(map(characters, arguments)) + MAX_WIDTH) * max(1, fields) > MAX_CHARACTERS * 10:
        raise SecurityError("a formatted text is too long.")


def check_call(name: str, subject: Any, arguments: Sequence[Any]) -> None:
    """Raises SecurityError if the method or filter `name` of `subject` would make something too large."""
    if name in _WIDTHS:
        widest = max((abs(width) for width in arguments if isinstance(width, int)), default=8)
        places = characters(subject) if name in ("indent", "tojson", "expandtabs") else 1
        if widest > MAX_WIDTH or widest * places > MAX_CHARACTERS:
            raise SecurityError("a width is too large.")
    if name in _MEASURED:
        for value in (subject, *arguments):
            measured(value)
    if name == "replace" and len(arguments) >= 2:
        text, old, new = str(subject), str(arguments[0]), str(arguments[1])
        if len(text) + (text.count(old) if old else len(text) + 1) * len(new) > MAX_CHARACTERS:
            raise SecurityError("a text is too long.")
    elif name == "join":
        # As a filter the items come first, as a method the separator does.
        parts, separator = (arguments[0], subject) if isinstance(subject, str) and arguments else (subject, "")
        if parts is subject and arguments:
            separator = arguments[0]
        if hasattr(parts, "__len__") and len(parts) * len(str(separator)) + characters(parts) > MAX_CHARACTERS:
            raise SecurityError("a text is too long.")
    elif name in ("format", "format_map") and isinstance(subject, str):
        check_format(subject, arguments)
    elif name == "sum" and any(hasattr(value, "__len__") for value in arguments):
        raise SecurityError("only numbers can be summed.")
