"""Requests that ask a connector what can be loaded for them, wait for its answer, and take its offers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmkit.hookspecs.connector import Load, LoadOffer, max_held_blocks
from llmkit.kv_cache.manager import KVCacheManager
from llmkit.requests.request import Request, RequestStatus
from llmkit.scheduling.guarded_connector import NOTHING, GuardedConnector
from llmkit.scheduling.pending_loads import PendingLoad, PendingLoads, written_columns
from llmkit.scheduling.transfer_view import SequenceView, tables_of

MAX_LOADS = 3
"""How often a request may load without running in between: what was loaded can be evicted again before it runs."""


@dataclass(slots=True)
class _Record:
    """What is remembered of a request from its first question to its end.

    asked_at: since when it waits for an answer; None: it does not. waited_s: how long it has waited for earlier ones
    since it entered last: what it then waits for room is not the connector's fault. num_loads: since it ran last.
    refused: it loads no more. counted: it is in the totals.
    """

    asked_at: float | None = None
    waited_s: float = 0.0
    num_loads: int = 0
    refused: bool = False
    counted: bool = False


class LoadRequests:
    """connector: None if nothing is ever loaded. loads: the record of loads that offers become part of.

    max_waiting: requests that wait for the connector at a time. query_tokens: tokens that the cache did not have when
    a request that the connector was asked about first entered.
    """

    def __init__(
        self,
        connector: GuardedConnector | None,
        loads: PendingLoads,
        *,
        timeout_s: float,
        max_waiting: int,
        clock: Callable[[], float],
    ) -> None:
        self.query_tokens = 0
        self._connector = connector
        self._loads = loads
        self._timeout_s = timeout_s
        self._max_waiting = max_waiting
        self._clock = clock
        self._manager: KVCacheManager | None = None
        self._records: dict[Request, _Record] = {}
        self._parked: dict[Request, None] = {}

    def bind(self, manager: KVCacheManager) -> None:
        """Use this manager from now on; nobody waits."""
        self._manager = manager
        self._parked.clear()
        self._records.clear()

    def __contains__(self, request: Request) -> bool:
        """Whether `request` waits for an answer or for an asynchronous load."""
        return request in self._parked or request in self._loads

    @property
    def num_waiting(self) -> int:
        """Requests that wait for an answer or for an asynchronous load."""
        return len(self._parked) + self._loads.num_waiting

    @property
    def full(self) -> bool:
        """Whether so many requests wait that no other one may begin to."""
        return self._connector is not None and self.num_waiting >= self._max_waiting

    def offer(self, request: Request, num_computed_tokens: int) -> LoadOffer | None:
        """What to load for a request that is about to enter, behind the tokens that the cache has. None: it must wait
        for the answer, see `park`."""
        if self._connector is None:
            return NOTHING
        record = self._records.setdefault(request, _Record())
        if record.refused or record.num_loads >= MAX_LOADS:
            return NOTHING
        if self._loads.num_abandoned_blocks > max_held_blocks(self._kv.layout):
            return NOTHING
        if not self._comes_anyway(request, num_computed_tokens):
            view = SequenceView(request, self._kv)
            offer = self._connector.offer(view, num_computed_tokens, self._kv.block_size)
            if offer is not None:
                self._answered(record)
                return offer
        if record.asked_at is not None and record.waited_s + self._clock() - record.asked_at > self._timeout_s:
            record.refused = True
            self._connector.fault(f"offer() had no answer for {self._timeout_s:g} s")
            return NOTHING
        return None

    def _answered(self, record: _Record) -> None:
        if record.asked_at is not None:
            record.waited_s += self._clock() - record.asked_at
            record.asked_at = None

    def _comes_anyway(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether another request's load brings the next block of this one."""
        if not self._loads:
            return False
        block = num_computed_tokens // self._kv.block_size
        hashes = self._kv.block_hashes(request, block + 1)
        return len(hashes) > block and self._loads.brings(hashes[block])

    def park(self, request: Request) -> None:
        """`request` waits for an answer."""
        self._parked[request] = None
        record = self._records[request]
        if record.asked_at is None:
            record.asked_at = self._clock()

    def unpark(self, request: Request) -> None:
        """`request` waits for an answer no longer."""
        self._parked.pop(request, None)

    def take_answered(self) -> list[Request]:
        """Parked requests whose question has an answer by now, latest first; they are to be asked about once more."""
        lookup = self._kv.lookup
        answered = [request for request in self._parked if self.offer(request, lookup(request).num_tokens) is not None]
        for request in answered:
            del self._parked[request]
        return answered[::-1]

    def begin(self, request: Request, num_computed_tokens: int, offer: LoadOffer) -> None:
        """Load `offer` into the blocks that `request` holds, with the step that is being planned."""
        assert self._connector is not None
        size = self._kv.block_size
        first, last = num_computed_tokens // size, (num_computed_tokens + offer.num_tokens) // size
        tables = tuple(table[:last] for table in tables_of(self._kv, request))
        load = Load(
            self._connector.new_id(),
            SequenceView(request, self._kv),
            num_computed_tokens,
            offer.num_tokens,
            tables,
            offer.asynchronous,
        )
        hashes = frozenset(self._kv.block_hashes(request, last)[first:])
        self._records[request].num_loads += 1
        self._loads.begin(PendingLoad(load, request, written_columns(tables, first), hashes, self._deadline()))

    def _deadline(self) -> float:
        return self._clock() + self._timeout_s

    def entered(self, request: Request, num_local_tokens: int) -> None:
        """`request` runs, or begins to load; the cache itself had so many of its tokens."""
        record = self._records.get(request)
        if record is None:
            return
        record.asked_at, record.waited_s = None, 0.0
        if request.status is RequestStatus.RUNNING:
            record.num_loads = 0
        if not record.counted:
            record.counted = True
            self.query_tokens += request.num_tokens - num_local_tokens

    def refuse(self, request: Request) -> None:
        """A load of `request` has failed: it is not tried again."""
        self._records.setdefault(request, _Record()).refused = True

    def forget(self, request: Request) -> None:
        """`request` has ended."""
        self._records.pop(request, None)

    @property
    def _kv(self) -> KVCacheManager:
        assert self._manager is not None
        return self._manager
