"""Stop strings: found wherever token borders fall, and never half shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
        self._stops = tuple(stops)
        self._include = include_in_output
        self._min_tokens = min_tokens
        self._held = ""
        self._longest = max((len(stop) for stop in self._stops), default=0)

    def feed(self, text: str, num_tokens: int) -> str | StopMatch:
        """`text` came with the `num_tokens`-th token. Returns what may be shown now, or the match.

        Cost is proportional to `text` and the length of the stop strings, not to the answer."""
        if not self._stops or not text:
            return text
        window = self._held + text
        if num_tokens >= self._min_tokens:
            match = self._earliest(window, len(self._held))
            if match is not None:
                start, end, stop = match
                return StopMatch(stop, window[: end if self._include else start])
        hold = self._held_length(window)
        self._held = window[len(window) - hold :]
        return window[: len(window) - hold]

    def flush(self) -> str:
        """The answer has ended otherwise: what was held back belongs to it."""
        held, self._held = self._held, ""
        return held

    def _earliest(self, window: str, first_end: int) -> tuple[int, int, str] | None:
        """(start, end, stop) of the match with the smallest end > first_end, the longest among equals."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = window.find(stop, max(0, first_end - len(stop) + 1))
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or (end, start) < (best[1], best[0]):
                best = (start, end, stop)
        return best

    def _held_length(self, window: str) -> int:
        """Length of the longest end of `window` that is a proper beginning of a stop string."""
        for length in range(min(len(window), self._longest - 1), 0, -1):
            end = window[len(window) - length :]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0
