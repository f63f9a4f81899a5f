"""The general categories of Unicode, as sets of characters."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from llmkit.grammars.effort import spend
from llmkit_structured.regex_tree import ANY, LAST, Chars, chars

_BLOCK = 0x1000
_RUN = re.compile(r"(..)\1*")
_LONG_NAMES = {
    "Letter": "L", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Mark": "M", "Number": "N",
    "Decimal_Number": "Nd", "digit": "Nd", "Punctuation": "P", "Symbol": "S", "Separator": "Z", "Space_Separator": "Zs",
}  # fmt: skip


@lru_cache(64)
def unicode_class(name: str) -> Chars | None:
    r"""The characters of `\p{name}`: a general category (`Lu`, `L`, `Letter` …), `ASCII` or `Any`; None for others."""
    name = name.removeprefix("gc=").removeprefix("General_Category=")
    if name == "Any":
        return ANY
    if name == "ASCII":
        return chars([(0, 127)])
    wanted = _LONG_NAMES.get(name, name)
    if not re.fullmatch("[CLMNPSZ][a-z]?", wanted):
        return None
    runs = (run for start in range(0, LAST, _BLOCK) for run in _runs(start))
    found = [(low, high) for category, low, high in runs if category.startswith(wanted)]
    return chars(found) if found else None


@lru_cache(None)
def _runs(start: int) -> tuple[tuple[str, int, int], ...]:
    """(category, first, last) of the characters from `start` on, for one block: all of them take a tenth of a second,
    which is spent once, by several constraints if it is too much for one."""
    spend()
    names = "".join(map(unicodedata.category, map(chr, range(start, start + _BLOCK))))  # two letters each
    return tuple((run[1], start + run.start() // 2, start + run.end() // 2 - 1) for run in _RUN.finditer(names))
