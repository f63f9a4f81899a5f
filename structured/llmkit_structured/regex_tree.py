"""Regular languages as trees: what regular expressions are parsed to, and JSON schemas are turned into.

A tree says what a text is, not how it is matched: there are no groups, no greediness, and no anchors. Sets of
characters hold Unicode scalar values; surrogates cannot be in a text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from llmkit.grammars.effort import spend

Range = tuple[int, int]
LAST = 0x10FFFF


@dataclass(frozen=True)
class Chars:
    """One character out of `ranges`: sorted, apart from one another, both ends included."""

    ranges: tuple[Range, ...]

    def __contains__(self, character: str) -> bool:
        return any(low <= ord(character) <= high for low, high in self.ranges)


@dataclass(frozen=True)
class Sequence:
    """All `parts` in order; no parts: the empty text."""

    parts: tuple[Tree, ...]


@dataclass(frozen=True)
class Choice:
    """One of `options`; no options: no text at all."""

    options: tuple[Tree, ...]


@dataclass(frozen=True)
class Repeat:
    """`part` from `low` to `high` times; None: without bound."""

    part: Tree
    low: int
    high: int | None


Tree = Chars | Sequence | Choice | Repeat

EMPTY = Sequence(())
NOTHING = Choice(())


def chars(ranges: Iterable[Range]) -> Chars:
    """The set of all characters in `ranges`, which may overlap; surrogates are left out."""
    spend()
    merged: list[Range] = []
    for low, high in sorted(_scalar_values(ranges)):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return Chars(tuple(merged))


def _scalar_values(ranges: Iterable[Range]) -> Iterable[Range]:
    for low, high in ranges:
        if low <= high:
            if low < 0xD800:
                yield low, min(high, 0xD7FF)
            if high > 0xDFFF:
                yield max(low, 0xE000), high


def complement(part: Chars) -> Chars:
    """Every character that is not in `part`."""
    gaps, start = [], 0
    for low, high in part.ranges:
        gaps.append((start, low - 1))
        start = high + 1
    return chars([*gaps, (start, LAST)])


def intersection(one: Chars, other: Chars) -> Chars:
    """Every character that is in both."""
    return chars((max(low, lower), min(high, higher)) for low, high in one.ranges for lower, higher in other.ranges)


ANY = complement(Chars(()))
"""Any character, line ends included."""


@lru_cache(1024)
def single(code: int) -> Chars:
    """Exactly one character; none if it is half of a surrogate pair."""
    return chars([(code, code)])


def text(literal: str) -> Tree:
    """Exactly `literal`."""
    return sequence(single(ord(character)) for character in literal)


def sequence(parts: Iterable[Tree]) -> Tree:
    """All of `parts` in order, without needless nesting."""
    flat: list[Tree] = []
    for part in parts:
        if part == NOTHING or (isinstance(part, Chars) and not part.ranges):
            return NOTHING
        flat.extend(part.parts if isinstance(part, Sequence) else [part])
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat))


def choice(options: Iterable[Tree]) -> Tree:
    """One of `options`, without needless nesting, duplicates, or options that no text meets."""
    spend()  # to compare trees is to go through them
    flat: dict[Tree, None] = {}
    for option in options:
        for one in option.options if isinstance(option, Choice) else (option,):
            if not (isinstance(one, Chars) and not one.ranges):
                flat[one] = None
    return next(iter(flat)) if len(flat) == 1 else Choice(tuple(flat))


def repeat(part: Tree, low: int, high: int | None) -> Tree:
    """`part` from `low` to `high` times."""
    if part in (EMPTY, NOTHING):
        return EMPTY if low == 0 else part
    if high == 0 or (high is not None and high < low):
        return EMPTY if high is not None and high >= low else NOTHING
    return part if (low, high) == (1, 1) else Repeat(part, low, high)


def optional(part: Tree) -> Tree:
    """`part` or nothing."""
    return repeat(part, 0, 1)


def length_bounds(tree: Tree) -> tuple[int, int | None]:
    """Length in characters of the shortest and the longest text; None: there is no longest."""
    if isinstance(tree, Chars):
        return 1, 1
    if isinstance(tree, Repeat):
        low, high = length_bounds(tree.part)
        longest = None if high is None or tree.high is None else high * tree.high
        return low * tree.low, 0 if high == 0 else longest
    inner = [length_bounds(part) for part in (tree.parts if isinstance(tree, Sequence) else tree.options)]
    lows, highs = [low for low, _ in inner], [high for _, high in inner]
    if isinstance(tree, Sequence):
        return sum(lows), None if None in highs else sum(high for high in highs if high is not None)
    return min(lows, default=0), None if None in highs else max((high for high in highs if high is not None), default=0)


def size(tree: Tree) -> int:
    """Number of characters in the tree with every repetition written out: what an automaton of it grows with."""
    if isinstance(tree, Chars):
        return 1
    if isinstance(tree, Repeat):
        return size(tree.part) * max(1, tree.low, tree.high or 0)
    return sum(size(part) for part in (tree.parts if isinstance(tree, Sequence) else tree.options))


def alphabet_misses(tree: Tree, allowed: Chars) -> bool:
    """Whether `tree` uses a character that is not in `allowed`."""
    if isinstance(tree, Chars):
        return intersection(tree, allowed) != tree
    if isinstance(tree, Repeat):
        return alphabet_misses(tree.part, allowed)
    return any(alphabet_misses(part, allowed) for part in (tree.parts if isinstance(tree, Sequence) else tree.options))


def replace_chars(tree: Tree, change: dict[Chars, Tree]) -> Tree:
    """The same tree with each set of characters that is a key of `change` replaced."""
    if isinstance(tree, Chars):
        return change.get(tree, tree)
    if isinstance(tree, Repeat):
        return repeat(replace_chars(tree.part, change), tree.low, tree.high)
    if isinstance(tree, Sequence):
        return sequence(replace_chars(part, change) for part in tree.parts)
    return choice(replace_chars(option, change) for option in tree.options)


def char_sets(tree: Tree) -> set[Chars]:
    """Every set of characters in `tree`."""
    if isinstance(tree, Chars):
        return {tree}
    if isinstance(tree, Repeat):
        return char_sets(tree.part)
    return set().union(*map(char_sets, tree.parts if isinstance(tree, Sequence) else tree.options))


_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 _,:;\"'<>=!@%`~/")


def pattern(tree: Tree) -> str:
    r"""`tree` as a regular expression of the common core of Rust's and RE2's syntax: non-capturing groups, classes of
    `\x{…}` ranges, counted repetitions. Matches what it matches only as a whole."""
    if isinstance(tree, Chars):
        return _set(tree.ranges)
    if isinstance(tree, Sequence):
        return "".join(map(pattern, tree.parts))
    if tree == NOTHING:
        return _set(())
    if isinstance(tree, Choice):
        return "(?:" + "|".join(map(pattern, tree.options)) + ")"
    inner = pattern(tree.part)
    if not (isinstance(tree.part, (Chars, Choice))):
        inner = f"(?:{inner})"
    counts = {(0, 1): "?", (0, None): "*", (1, None): "+"}
    if (tree.low, tree.high) in counts:
        return inner + counts[tree.low, tree.high]
    if tree.low == tree.high:
        return f"{inner}{{{tree.low}}}"
    return f"{inner}{{{tree.low},{'' if tree.high is None else tree.high}}}"


def _set(ranges: tuple[Range, ...]) -> str:
    if not ranges:
        return f"[^{_character(0)}-{_character(LAST)}]"
    written = [_character(low) if low == high else f"{_character(low)}-{_character(high)}" for low, high in ranges]
    return written[0] if len(ranges) == 1 and ranges[0][0] == ranges[0][1] else f"[{''.join(written)}]"


def _character(code: int) -> str:
    return chr(code) if chr(code) in _PLAIN else f"\\x{{{code:x}}}"
