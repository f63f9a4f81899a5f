"""Characters that nothing in a request tells apart are one symbol; automata over symbols, made by interegular."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llmkit_structured.regex_tree import LAST, Chars, Choice, Repeat, Sequence, Tree, char_sets

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")


@dataclass(frozen=True)
class Alphabet:
    """starts: first character of each symbol's range; the symbol is that character itself."""

    starts: tuple[int, ...]

    @classmethod
    def of(cls, sets: Iterable[Chars], apart: Iterable[str] = ()) -> Alphabet:
        """The coarsest one, by ranges, that tells the sets from their complements, and each of `apart` from all."""
        starts = {0}
        for one in sets:
            for low, high in one.ranges:
                starts.update((low, high + 1))
        for character in apart:
            starts.update((ord(character), ord(character) + 1))
        return cls(tuple(sorted(start for start in starts if start <= LAST)))

    def symbol(self, character: str) -> str:
        """What stands for `character`."""
        return chr(self.starts[bisect_right(self.starts, ord(character)) - 1])

    def symbols(self, low: int, high: int) -> list[str]:
        """What stands for the characters of a range."""
        first, last = bisect_right(self.starts, low) - 1, bisect_right(self.starts, high)
        return [chr(start) for start in self.starts[first:last]]


def code_range(beginning: bytes) -> tuple[int, int]:
    """Least and greatest code of the characters whose UTF-8 form begins with `beginning`, which is not a whole one."""
    length = 2 if beginning[0] < 0xE0 else 3 if beginning[0] < 0xF0 else 4
    code = beginning[0] & (0x7F >> length)
    for byte in beginning[1:]:
        code = code << 6 | byte & 0x3F
    missing = 6 * (length - len(beginning))
    least = {2: 0x80, 3: 0x800, 4: 0x10000}[length]
    return max(code << missing, least), min((code << missing) + (1 << missing) - 1, LAST)


class _SymbolIndex:
    """The library's table of transitions, where each symbol is its own transition."""

    def __init__(self, symbols: Iterable[str]) -> None:
        self.by_transition: Mapping[str, list[str]] = {symbol: [symbol] for symbol in symbols}

    def __contains__(self, symbol: object) -> bool:
        return symbol in self.by_transition

    def __getitem__(self, symbol: str) -> str:
        return symbol

    def keys(self) -> Iterable[str]:
        return self.by_transition.keys()


@dataclass(frozen=True)
class Automaton:
    """What RegexParser needs of an automaton; only states from which a text can be completed."""

    initial: int
    finals: frozenset[int]
    map: dict[int, dict[str, int]]

    @cached_property
    def alphabet(self) -> _SymbolIndex:
        return _SymbolIndex({symbol for steps in self.map.values() for symbol in steps})


def automaton(tree: Tree, alphabet: Alphabet) -> Automaton:
    """The automaton of `tree` over symbols."""
    import interegular

    machine: Any = interegular.parse_pattern(_written(tree, alphabet.symbols)).to_fsm()
    live = {state for state in machine.states if machine.islive(state)}
    steps: dict[int, dict[str, int]] = {}
    for state in live:
        found: dict[str, int] = {}
        for transition, target in machine.map.get(state, {}).items():
            if target in live:
                found.update((s, target) for s in machine.alphabet.by_transition[transition] if isinstance(s, str))
        steps[state] = found
    return Automaton(machine.initial, frozenset(machine.finals), steps)


def automaton_of_texts(texts: Iterable[str], alphabet: Alphabet) -> Automaton:
    """The automaton of a list of texts: a state for each beginning."""
    steps: dict[int, dict[str, int]] = {0: {}}
    finals = set()
    for text in texts:
        state = 0
        for symbol in map(alphabet.symbol, text):
            following = steps[state].setdefault(symbol, len(steps))
            steps.setdefault(following, {})
            state = following
        finals.add(state)
    return Automaton(0, frozenset(finals), steps)


def _written(tree: Tree, symbols: Callable[[int, int], list[str]]) -> str:
    """A regular expression of the library's dialect in which every set of characters is a list of symbols."""
    if isinstance(tree, Chars):
        inside = [s for low, high in tree.ranges for s in symbols(low, high)]
        escaped = [
            s if s in _PLAIN or s > "\x7f" else "\\" + s if s.isprintable() else f"\\x{ord(s):02x}" for s in inside
        ]
        return "[" + "".join(dict.fromkeys(escaped)) + "]"
    if isinstance(tree, Sequence):
        return "".join(_written(part, symbols) for part in tree.parts)
    if isinstance(tree, Choice):
        return "(?:" + "|".join(_written(option, symbols) for option in tree.options) + ")"
    assert isinstance(tree, Repeat)
    inner = _written(tree.part, symbols)
    high = "" if tree.high is None else tree.high
    return f"(?:{inner}){{{tree.low},{high}}}"


def sets_of(trees: Iterable[Tree]) -> set[Chars]:
    """Every set of characters in `trees`."""
    return set().union(*map(char_sets, trees))
