"""How loads end: by report, by a failure, because they took too long, or because nobody waits for them any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from llmkit.kv_cache.manager import KVCacheManager
from llmkit.requests.request import Request, RequestStatus
from llmkit.scheduling.guarded_connector import GuardedConnector
from llmkit.scheduling.load_requests import LoadRequests
from llmkit.scheduling.pending_loads import EndedLoad, PendingLoad, PendingLoads


@dataclass(slots=True)
class LoadCounts:
    """Totals. num_loads: loads that have ended. hit_tokens: tokens that they have brought."""

    num_loads: int = 0
    num_failed_loads: int = 0
    hit_tokens: int = 0


class LoadEnds:
    """Takes loads out of the record when they are over, and keeps the news for the requests that waited for them, until
    the scheduler takes it. `loads` and `requests` are shared with `Transfers`.

    timeout_s: how long a load is waited for; clock: seconds, never going back.
    """

    def __init__(
        self,
        connector: GuardedConnector | None,
        loads: PendingLoads,
        requests: LoadRequests,
        *,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.counts = LoadCounts()
        self._connector = connector
        self._loads = loads
        self._requests = requests
        self._timeout_s = timeout_s
        self._clock = clock
        self._manager: KVCacheManager | None = None
        self._ended: list[EndedLoad] = []
        self._cancelled: list[int] = []

    def __bool__(self) -> bool:
        """Whether there is news for requests."""
        return bool(self._ended)

    def __contains__(self, request: Request) -> bool:
        """Whether `request` waited for an asynchronous load and has not been told of its end."""
        return any(load.request is request and load.asynchronous for load in self._ended)

    @property
    def num_waiting(self) -> int:
        """Requests of which this is so."""
        return sum(load.asynchronous for load in self._ended)

    @property
    def has_cancelled(self) -> bool:
        """Whether the workers have yet to be told that nobody waits for some load."""
        return bool(self._cancelled)

    def bind(self, manager: KVCacheManager) -> None:
        """Use this manager, in which nothing is held. What is under way keeps its blocks, but nobody waits for it."""
        self._manager = manager
        self._ended.clear()
        for load in self._loads.unfinished:
            self._loads.let_go(load)
            manager.hold(load.columns)

    def broken_off(self) -> None:
        """No step is under way any more, and every request has been ended."""
        self._loads.forget_steps()
        for load in self._loads.unfinished:
            if load.request is not None:
                self.let_go(load)

    def counted(self) -> Counter[int]:
        """Block → how many loads that nobody waits for write to it."""
        return Counter(block for load in self._loads.unfinished if load.request is None for block in load.columns)

    def take_cancelled(self) -> tuple[int, ...]:
        """Ids of the loads that nobody waits for any more, for the workers."""
        cancelled, self._cancelled = tuple(self._cancelled), []
        return cancelled

    def end(self, load: PendingLoad) -> None:
        """Nothing writes to the blocks of `load` any more."""
        request = load.request
        self._loads.end(load)
        self.counts.num_loads += 1
        self.counts.num_failed_loads += bool(load.failed)
        if request is None:
            self._kv.release(load.columns)
        elif request.status is not RequestStatus.FINISHED:
            usable = load.num_usable_tokens(self._kv.block_size)
            self.counts.hit_tokens += usable - load.load.first_token
            if load.failed:
                self._requests.refuse(request)
            if load.failed or load.asynchronous:
                self._ended.append(EndedLoad(request, usable, bool(load.failed), load.asynchronous))

    def end_reported(self, load_ids: Iterable[int]) -> set[int]:
        """These asynchronous loads are over. Returns the ids that there are none of."""
        unknown = set()
        for load_id in load_ids:
            load = self._loads.find(load_id)
            if load is None:
                unknown.add(load_id)
            else:
                self.end(load)
        return unknown

    def take(self) -> list[EndedLoad]:
        """Loads that are over for their requests, by report or because they took too long: asynchronous ones, and
        synchronous ones that have failed."""
        now = self._clock()
        for load in self._loads.asynchronous:
            request = load.request
            if request is not None and now > load.deadline and self._connector is not None:
                self._connector.fault(f"a load was not reported within {self._timeout_s:g} s")
                load.fail()
                self.let_go(load)
                self._requests.refuse(request)
                self._ended.append(EndedLoad(request, load.load.first_token, True, True))
        ended, self._ended = self._ended, []
        return ended

    def let_go(self, load: PendingLoad) -> None:
        """Its request waits no longer. The blocks stay held, as something may still write to them."""
        self._loads.let_go(load)
        self._kv.hold(load.columns)
        self._cancelled.append(load.load_id)

    def give_up(self, request: Request) -> None:
        """`request` waits for no load any longer."""
        self._ended = [load for load in self._ended if load.request is not request]
        load = self._loads.of(request)
        if load is not None:
            self.let_go(load)

    @property
    def _kv(self) -> KVCacheManager:
        assert self._manager is not None
        return self._manager
