"""Faults of a plugin at run time: counted, and after too many of them the plugin is left alone for a while."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Literal

from llmkit.errors import described

logger = logging.getLogger(__name__)

BreakerState = Literal["closed", "open", "half-open"]

MAX_PAUSE_S = 600.0
"""Longest pause, in seconds, however often the plugin has failed again after one."""


@dataclass(frozen=True, slots=True)
class FaultCount:
    """Faults of one plugin since its engine has started. state: "closed" while it is asked, "open" while it is not,
    "half-open" while it is asked again and the next fault would end that. last_fault: in words, None if none."""

    num_faults: int
    state: BreakerState
    last_fault: str | None


class Breaker:
    """Counts the faults of one plugin and says whether to go on asking it. Used by the guard around the plugin, which
    asks `open` before a call and answers itself when it is, and hands what went wrong to `record`. Thread-safe.

    `limit` faults within `window_s` seconds open it. After `pause_s` seconds it is half-open: calls are made again.
    A fault then opens it at once, for twice as long as before (up to MAX_PAUSE_S); `window_s` seconds without one
    close it. clock: seconds, never going back. on_open: told, outside any lock, each time it opens.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        limit: int = 5,
        window_s: float = 60.0,
        *,
        pause_s: float = 30.0,
        clock: Callable[[], float] = monotonic,
        on_open: Callable[[FaultCount], None] | None = None,
    ) -> None:
        self.kind = kind
        self.name = name
        self._window_s = window_s
        self._first_pause_s = pause_s
        self._clock = clock
        self._on_open = on_open
        self._lock = threading.Lock()
        self._recent: deque[float] = deque(maxlen=max(1, limit))
        self._pause_s = pause_s
        self._asked_again_at: float | None = None  # None: closed
        self._num_faults = 0
        self._last_fault: str | None = None

    def record(self, fault: BaseException | str) -> None:
        """One more fault: the exception that the plugin raised, or what else was wrong, in words."""
        words = described(fault) if isinstance(fault, BaseException) else fault
        now = self._clock()
        with self._lock:
            state = self._state(now)
            self._num_faults += 1
            self._last_fault = words
            opened = self._opens(state, now)
            count = FaultCount(self._num_faults, self._state(now), words)
            pause_s = self._pause_s
        if opened:
            logger.warning(
                "The %s plugin %r is not asked any more for %.0f s, after %d faults; the last: %s",
                self.kind, self.name, pause_s, count.num_faults, words,
            )  # fmt: skip
            if self._on_open is not None:
                self._on_open(count)

    @property
    def open(self) -> bool:
        """Whether the plugin must not be called now."""
        # Asked before every call: without faults it must cost nothing. A stale answer only makes one call more.
        if self._asked_again_at is None:
            return False
        return self.state == "open"

    @property
    def state(self) -> BreakerState:
        with self._lock:
            return self._state(self._clock())

    @property
    def num_faults(self) -> int:
        """All faults so far, those while it was open included."""
        return self._num_faults

    @property
    def last_fault(self) -> str | None:
        """The last fault in words, None if there was none."""
        return self._last_fault

    def count(self) -> FaultCount:
        """Number, state and last fault of one moment."""
        with self._lock:
            return FaultCount(self._num_faults, self._state(self._clock()), self._last_fault)

    def _state(self, now: float) -> BreakerState:
        """The state now; forgets what is over. With the lock held."""
        if self._asked_again_at is None:
            return "closed"
        if now < self._asked_again_at:
            return "open"
        if now < self._asked_again_at + self._window_s:
            return "half-open"
        self._asked_again_at = None
        self._pause_s = self._first_pause_s
        return "closed"

    def _opens(self, state: BreakerState, now: float) -> bool:
        """Whether a fault in `state` opens the breaker, which is then done. With the lock held."""
        if state == "open":  # from a call that was under way
            return False
        if state == "half-open":
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        else:
            self._recent.append(now)
            if len(self._recent) < (self._recent.maxlen or 1) or now - self._recent[0] > self._window_s:
                return False
        self._recent.clear()
        self._asked_again_at = now + self._pause_s
        return True
