"""When to start the engine process again after a crash, and when to give up."""

from __future__ import annotations

from collections.abc import Iterable

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 10.0


class Restarts:
    """Crashes within the last `window_s` seconds. count: restarts so far.

    Borne are `limit` of them that no request can have caused: an engine that crashes by itself is broken. All others
    only make the next start wait longer, for whoever is guilty of them fails. limit 0: no crash at all is borne.
    """

    def __init__(self, limit: int, window_s: float) -> None:
        self._limit = limit
        self._window_s = window_s
        self._crashes: list[tuple[float, frozenset[str]]] = []
        self._unprovoked: list[float] = []
        self.count = 0

    @property
    def num_unprovoked(self) -> int:
        """Crashes in the window, as of the last one, that no request can have caused."""
        return len(self._unprovoked)

    def crashed(self, now: float, request_ids: Iterable[str] = ()) -> None:
        """The process has died while it had these requests."""
        start, ids = now - self._window_s, frozenset(request_ids)
        self._crashes = [*(crash for crash in self._crashes if crash[0] > start), (now, ids)]
        self._unprovoked = [time for time in self._unprovoked if time > start] + ([] if ids else [now])

    def explained(self, request_id: str, *, wholly: bool) -> None:
        """That request was found guilty of the last crash, and with it of those before that it was part of. wholly:
        nothing waits for them any more, as the engine works for others; else they make it wait like one."""
        last = self._crashes[-1][0]
        self._crashes = [crash for crash in self._crashes if request_id not in crash[1]]
        if not wholly:
            self._crashes.append((last, frozenset()))

    def take_riddle(self) -> bool:
        """Whether there have been more than `limit` crashes that requests can have caused, and none was found guilty
        of. They are counted anew then."""
        if sum(bool(ids) for _, ids in self._crashes) <= self._limit:
            return False
        self._crashes = [(time, frozenset()) for time, _ in self._crashes]
        return True

    def next_delay(self) -> float | None:
        """Seconds to wait before the process is started again; None: it is not. The first of several crashes is
        answered at once, each further one later than the one before."""
        if not self._limit or len(self._unprovoked) > self._limit:
            return None
        self.count += 1
        earlier = len(self._crashes) - 1
        return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (earlier - 1)) if earlier > 0 else 0.0
