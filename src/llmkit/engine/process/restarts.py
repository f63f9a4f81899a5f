"""When to start the engine process again after a crash, and when to give up."""

from __future__ import annotations

from collections.abc import Collection, Iterable

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 10.0


class Restarts:
    """Crashes within the last `window_s` seconds, of which `limit` are borne. count: restarts so far.

    A request that is found guilty of crashes has explained them: an engine that works for others is no worse for it.
    Where there is no sign that it does, all crashes of one guilty request count as one: an engine that every request
    kills is given up.
    """

    def __init__(self, limit: int, window_s: float) -> None:
        self._limit = limit
        self._window_s = window_s
        self._crashes: list[tuple[float, Collection[str]]] = []
        self.count = 0

    @property
    def num_recent(self) -> int:
        """Crashes in the window, as of the last one."""
        return len(self._crashes)

    def crashed(self, now: float, request_ids: Iterable[str] = ()) -> None:
        """The process has died while these requests were computed."""
        self._crashes = [crash for crash in self._crashes if crash[0] > now - self._window_s]
        self._crashes.append((now, frozenset(request_ids)))

    def explained(self, request_id: str, *, wholly: bool) -> None:
        """That request was found guilty of the last crash, and with it of those before that it was part of. wholly:
        they do not count at all; else the last one does."""
        last = self._crashes[-1][0]
        self._crashes = [crash for crash in self._crashes if request_id not in crash[1]]
        if not wholly:
            self._crashes.append((last, ()))

    def next_delay(self) -> float | None:
        """Seconds to wait before the process is started again; None: it is not. The first of several crashes is
        answered at once, each further one later than the one before."""
        if len(self._crashes) > self._limit:
            return None
        self.count += 1
        earlier = len(self._crashes) - 1
        return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (earlier - 1)) if earlier > 0 else 0.0
