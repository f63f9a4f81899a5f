"""Languages of JSON strings: the texts, in quotes and with escapes, of the strings of a language.

One spelling for each character: itself where JSON allows that, else the short escape, else four hexadecimal digits.
"""

from __future__ import annotations

from collections.abc import Iterable

from llmkit_structured.regex_tree import (
    ANY,
    EMPTY,
    Chars,
    Repeat,
    Sequence,
    Tree,
    char_sets,
    chars,
    choice,
    complement,
    intersection,
    length_bounds,
    repeat,
    replace_chars,
    sequence,
    text,
)
from llmkit_structured.schema_form import String
from llmkit_structured.schema_refusal import UnsupportedSchema

QUOTE = text('"')
PLAIN = complement(chars([(0, 31), (0x22, 0x22), (0x5C, 0x5C)]))
"""Characters that stand for themselves in a JSON string."""

_SHORT = {0x22: '"', 0x5C: "\\", 8: "b", 12: "f", 10: "n", 13: "r", 9: "t"}


def in_quotes(content: Tree) -> Tree:
    """The JSON texts of the strings of `content`."""
    return sequence([QUOTE, replace_chars(content, {part: written(part) for part in char_sets(content)}), QUOTE])


def written(part: Chars) -> Tree:
    """How the characters of `part` stand in a JSON string."""
    plain = intersection(part, PLAIN)
    escaped = [code for code in (*range(32), 0x22, 0x5C) if chr(code) in part]
    short = [text("\\" + _SHORT[code]) for code in escaped if code in _SHORT]
    long = [text(f"\\u{code:04x}") for code in escaped if code not in _SHORT]
    return choice([plain, *short, *long])


def content_of(form: String) -> Tree:
    """The strings of `form`, unquoted. Raises UnsupportedSchema where several constraints have no common tree."""
    if not form.patterns:
        return repeat(ANY, form.low, form.high)
    if len(form.patterns) > 1:
        names = " and ".join(dict.fromkeys(f"{one.keyword} {one.source!r:.40}" for one in form.patterns))
        raise UnsupportedSchema("#", f"{names} for the same string")
    pattern = form.patterns[0]
    low, high = length_bounds(pattern.tree)
    if form.low <= low and (form.high is None or (high is not None and high <= form.high)):
        return pattern.tree
    bounded = _bounded(pattern.tree, form.low, form.high)
    if bounded is None:
        keyword = "maxLength" if form.high is not None else "minLength"
        raise UnsupportedSchema("#", f"{keyword} beside {pattern.keyword} {pattern.source!r:.40}")
    return bounded


def _bounded(tree: Tree, low: int, high: int | None) -> Tree | None:
    """`tree` with texts of `low` to `high` characters only, if one repetition of single characters takes up all the
    difference; else None."""
    parts: list[Tree] = list(tree.parts) if isinstance(tree, Sequence) else [tree]
    if len(parts) == 3 and parts[0] == parts[2] == repeat(ANY, 0, None) and length_bounds(parts[1]) == (0, 0):
        parts = [parts[0]]
    loose = [i for i, part in enumerate(parts) if length_bounds(part)[0] != length_bounds(part)[1]]
    if len(loose) != 1:
        return None
    part = parts[loose[0]]
    if not isinstance(part, Repeat) or length_bounds(part.part) != (1, 1):
        return None
    fixed = sum(length_bounds(other)[0] for i, other in enumerate(parts) if i != loose[0])
    least = max(part.low, low - fixed)
    most = part.high if high is None else max(-1, high - fixed if part.high is None else min(part.high, high - fixed))
    parts[loose[0]] = choice([]) if most is not None and most < least else repeat(part.part, least, most)
    return sequence(parts)


def other_names(names: Iterable[str]) -> Tree:
    """Every string that is not among `names`, unquoted."""
    starts: dict[str, list[str]] = {}
    excluded = list(names)
    for name in excluded:
        if name:
            starts.setdefault(name[0], []).append(name[1:])
    anything = repeat(ANY, 0, None)
    first_of_none = complement(chars((ord(character), ord(character)) for character in starts))
    options = [sequence([first_of_none, anything])]
    options += [sequence([text(character), other_names(rests)]) for character, rests in starts.items()]
    if "" not in excluded:
        options.append(EMPTY)
    return choice(options)
