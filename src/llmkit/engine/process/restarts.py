"""When to start the engine process again after a crash, and when to give up."""

from __future__ import annotations

from collections import deque

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 10.0


class Restarts:
    """Crashes within the last `window_s` seconds, of which `limit` are borne. count: restarts so far."""

    def __init__(self, limit: int, window_s: float) -> None:
        self._limit = limit
        self._window_s = window_s
        self._crashes: deque[float] = deque()
        self.count = 0

    @property
    def num_recent(self) -> int:
        """Crashes in the window, as of the last one."""
        return len(self._crashes)

    def crashed(self, now: float) -> float | None:
        """Seconds to wait before the process is started again; None: it is not. The first of several crashes is
        answered at once, each further one later than the one before."""
        while self._crashes and self._crashes[0] <= now - self._window_s:
            self._crashes.popleft()
        self._crashes.append(now)
        if len(self._crashes) > self._limit:
            return None
        self.count += 1
        earlier = len(self._crashes) - 1
        return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (earlier - 1)) if earlier else 0.0
