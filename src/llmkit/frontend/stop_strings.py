"""Stop strings: found wherever token borders fall, and never half shown."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

_CHARACTERS = 0x110000


@dataclass(frozen=True, slots=True)
class StopMatch:
    """`text` may still be shown (with the stop string if that was asked for); then the answer ends."""

    stop: str
    text: str


class StopStringMatcher:
    """Watches the text of one sequence.

    The match that is complete first wins, and among those that end together the longest: the result does not
    depend on how the text was cut into pieces. Text that may turn out to be the beginning of a stop string is held
    back, and handed out by `flush` or as soon as it turns out not to be one.

    A stop string counts when the token that completes it is at least the `min_tokens`-th of the answer.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False, min_tokens: int = 0) -> None:
        self._automaton = _automaton(tuple(stops)) if stops else None
        self._include = include_in_output
        self._min_tokens = min_tokens
        self._held = ""
        self._state = 0

    def feed(self, text: str, num_tokens: int) -> str | StopMatch:
        """`text` came with the `num_tokens`-th token. Returns what may be shown now, or the match.

        Cost is proportional to `text`, whatever the number and the length of the stop strings."""
        automaton = self._automaton
        if automaton is None or not text:
            return text
        counts = num_tokens >= self._min_tokens
        window = self._held + text
        state = self._state
        for end, character in enumerate(text, len(self._held) + 1):
            state = automaton.step(state, character)
            if counts and (stop := automaton.complete[state]) is not None:
                return StopMatch(stop, window[: end if self._include else end - len(stop)])
        self._state = state
        hold = automaton.held[state]
        self._held = window[len(window) - hold :]
        return window[: len(window) - hold]

    def flush(self) -> str:
        """The answer has ended otherwise: what was held back belongs to it."""
        held, self._held = self._held, ""
        self._state = 0
        return held


class _Automaton:
    """All stop strings at once (Aho and Corasick, Efficient string matching, 1975). A state stands for the longest end
    of the text that is a beginning of a stop string; 0 for none.

    complete: per state, the longest stop string that ends here. held: per state, the length of the longest end of
    the text that is a beginning, but not the whole, of a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._edges: dict[int, int] = {}
        self._fallbacks = [0]
        self.complete: list[str | None] = [None]
        self.held = [0]
        for stop in stops:
            self._insert(stop)
        self._link()

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        code = ord(character)
        while (following := self._edges.get(state * _CHARACTERS + code)) is None:
            if state == 0:
                return 0
            state = self._fallbacks[state]
        return following

    def _insert(self, stop: str) -> None:
        state = 0
        for depth, character in enumerate(stop):
            self.held[state] = depth  # whoever goes on from a state may wait for more
            edge = state * _CHARACTERS + ord(character)
            if edge not in self._edges:
                self._edges[edge] = len(self.complete)
                self._fallbacks.append(0)
                self.complete.append(None)
                self.held.append(0)
            state = self._edges[edge]
        self.complete[state] = stop

    def _link(self) -> None:
        """Fallbacks, nearest to the root first: the state for the longest proper end of what a state stands for."""
        children: dict[int, list[tuple[str, int]]] = {}
        for edge, state in self._edges.items():
            children.setdefault(edge // _CHARACTERS, []).append((chr(edge % _CHARACTERS), state))
        order = deque(state for _, state in children.get(0, ()))
        while order:
            parent = order.popleft()
            for character, state in children.get(parent, ()):
                self._settle(state, self.step(self._fallbacks[parent], character))
                order.append(state)

    def _settle(self, state: int, fallback: int) -> None:
        self._fallbacks[state] = fallback
        self.complete[state] = self.complete[state] or self.complete[fallback]
        self.held[state] = self.held[state] or self.held[fallback]


@lru_cache(maxsize=32)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    """Sequences of a request, and requests of one client, mostly have the same stop strings."""
    return _Automaton(stops)
