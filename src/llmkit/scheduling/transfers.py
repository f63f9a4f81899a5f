"""What the scheduler does with a connector: loads for waiting requests, blocks held for stores, reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from llmkit.config.sections import ConnectorConfig
from llmkit.errors import InvalidRequestError, shown
from llmkit.hookspecs.connector import TransferReport
from llmkit.kv_cache.block_pool import IntegrityError
from llmkit.kv_cache.manager import KVCacheManager
from llmkit.kv_cache.prefix_cache import FilledListener
from llmkit.requests.request import Request
from llmkit.scheduling.guarded_connector import GuardedConnector
from llmkit.scheduling.load_ends import LoadCounts, LoadEnds
from llmkit.scheduling.load_requests import LoadRequests
from llmkit.scheduling.pending_loads import EndedLoad, PendingLoad, PendingLoads
from llmkit.scheduling.plan import InDoubt, StepPlan, StepResult, StepTransfers
from llmkit.scheduling.plan_builder import PlanBuilder
from llmkit.scheduling.transfer_holds import TransferHolds
from llmkit.scheduling.transfer_view import PlannedStep, SequenceView, tables_of

POLL_S = 0.002
"""How long a step that computes nothing waits for a transfer: new requests wait as long."""


class Transfers:
    """Owns everything that is under way between the cache and a connector. Without a connector every question is
    answered with nothing at once. Its parts: `requests` (who asks for loads), `holds` (blocks that nobody may write
    to), the record of loads, and what becomes of those that end.

    max_loading: requests that wait for a connector at a time. clock: seconds, never going back.
    """

    def __init__(
        self,
        connector: GuardedConnector | None,
        config: ConnectorConfig,
        *,
        max_loading: int,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.connector = connector
        self.fails_requests = config.load_failure_policy == "fail"
        self.holds = TransferHolds()
        self._loads = PendingLoads()
        self.requests = LoadRequests(
            connector if config.role != "producer" else None,
            self._loads,
            timeout_s=config.load_timeout_s,
            max_waiting=max_loading,
            clock=clock,
        )
        self._ends = LoadEnds(connector, self._loads, self.requests, timeout_s=config.load_timeout_s, clock=clock)
        self._stores_allowed = connector is not None and config.role != "consumer"
        self._timeout_s = config.load_timeout_s
        self._clock = clock
        self._manager: KVCacheManager | None = None
        self._step_wanted = False
        self._asked = False
        self._in_doubt = False
        self._stuck: tuple[Request, float] | None = None

    def bind(self, manager: KVCacheManager) -> None:
        """Use this manager from now on, in which nothing is held yet. What is under way keeps its blocks."""
        self._manager = manager
        self._stuck = None
        self.requests.bind(manager)
        self.holds.bind(manager)
        self._ends.bind(manager)

    def broken_off(self) -> None:
        """A call was broken off, and every request has been ended; no step is under way any more. Loads that were to be
        sent with the next step still will be, and write to blocks that their requests have given back. Whether the
        workers know of what was planned last, and whether what they told last has arrived, is asked with that step."""
        self._ends.broken_off()
        self._in_doubt = bool(self.holds.planned) or any(self._loads.asynchronous)

    def check_integrity(self) -> None:
        """Compare what is held in the KV cache with what it is held for. Raises IntegrityError."""
        wanted = self.holds.counted() + self._ends.counted()
        if wanted != self._kv.held:
            raise IntegrityError(f"blocks {dict(self._kv.held)} are held, but {dict(wanted)} for the connector")

    @property
    def counts(self) -> LoadCounts:
        """Of loads."""
        return self._ends.counts

    @property
    def on_filled(self) -> FilledListener | None:
        """For the KV cache manager; None if nobody wants to know."""
        return self.holds.filled if self._stores_allowed else None

    @property
    def _kv(self) -> KVCacheManager:
        assert self._manager is not None
        return self._manager

    # Questions

    def check(self, params: Mapping[str, Any] | None) -> None:
        """Raise InvalidRequestError if a request's `kv_transfer_params` are of no use here."""
        if params is None:
            return
        if self.connector is None:
            raise InvalidRequestError(
                "kv_transfer_params cannot be used: this engine has no connector.", param="kv_transfer_params"
            )
        problems = self.connector.problems(params)
        if problems:
            raise InvalidRequestError(" ".join(problems), param="kv_transfer_params")

    def __contains__(self, request: Request) -> bool:
        """Whether `request` waits for the connector."""
        return request in self._ends or request in self.requests

    @property
    def num_waiting(self) -> int:
        """Requests that wait for the connector."""
        return self.requests.num_waiting + self._ends.num_waiting

    @property
    def holds_blocks(self) -> bool:
        """Whether any block is held for the connector."""
        return bool(self._loads or self.holds.has_filled or len(self.holds))

    @property
    def num_under_way(self) -> int:
        """Loads and holds that have not ended."""
        return len(self._loads) + len(self.holds)

    @property
    def has_news(self) -> bool:
        """Whether there is something that the workers should soon be told, by a step without rows if need be."""
        news = self._step_wanted or self.holds.has_filled or self._loads.has_new or self._ends.has_cancelled
        return bool(news or self._in_doubt)

    @property
    def has_more_to_store(self) -> bool:
        """Whether the connector could not store all at once that it has been told of."""
        return self._stores_allowed and self.connector is not None and self.connector.has_more_to_store()

    @property
    def waits(self) -> bool:
        """Whether somebody can only go on after a report."""
        return bool(self._asked or self._ends or self._loads or self.requests.num_waiting or self._stuck)

    def worth_waiting(self, request: Request) -> bool:
        """Whether a transfer under way may soon end and give back blocks that `request` has no room without."""
        if not (self.holds_blocks or self._ends or self.requests.num_waiting):
            return False
        if self._stuck is None or self._stuck[0] is not request:
            self._stuck = (request, self._clock())
        return self._clock() - self._stuck[1] <= self._timeout_s

    def ask_workers(self) -> None:
        """Let the next step be made, if only for its report."""
        self._asked = True

    # Steps

    def plan(self, step: int, batch: PlanBuilder, *, idle: bool) -> StepTransfers | None:
        """What the workers are told in the step that `batch` becomes. None: nothing.

        idle: no other step is on its way, so that one without rows may wait for a transfer.
        """
        if self.connector is None:
            return None
        rows = bool(batch.requests)
        if rows:
            self._stuck = None
        elif not self.has_news and not (idle and self.waits):
            return None
        self._asked = False
        in_doubt = self._take_doubts()
        loads = self._loads.send_new(step)
        payload, holds = self._planned(step, batch, loads)
        if payload is None and loads and not self.connector.breaker.open:
            self.connector.fault("plan_transfers() left out loads that it was told of")
        cancelled = self._ends.take_cancelled()
        if rows and payload is None and not loads and not cancelled and in_doubt is None:
            return None
        return StepTransfers(
            payload,
            frozenset(block for load in loads if not load.asynchronous for block in load.columns),
            {load.load_id: frozenset(load.columns) for load in loads if load.asynchronous},
            holds,
            cancelled,
            0.0 if rows or payload is not None or loads or self._ends or in_doubt else POLL_S,
            in_doubt,
        )

    def _take_doubts(self) -> InDoubt | None:
        """What the workers are to be asked about, once: who hears nothing asks again, see `landed`."""
        if not self._in_doubt:
            return None
        self._in_doubt = False
        loads = {load.load_id: frozenset(load.columns) for load in self._loads.asynchronous}
        return InDoubt(loads, self.holds.planned)

    def _planned(self, step: int, batch: PlanBuilder, loads: list[PendingLoad]) -> tuple[Any, tuple[int, ...]]:
        """The connector's payload and the ids of its holds."""
        assert self.connector is not None
        self._step_wanted = False
        view = PlannedStep(step, batch, [load.load for load in loads], self.holds.peek_filled(), self._kv)
        plan = self.connector.plan_transfers(view)
        wrong = None if plan is None else self.holds.add(plan.holds, planned=True)
        self.holds.drop_filled()
        if plan is not None and wrong is not None:
            self.connector.fault(f"plan_transfers(): {wrong}")
            refused = frozenset(hold for hold in plan.holds if type(hold) is int)
            self.connector.update(TransferReport(released=refused, failed_holds=refused))
        return (None, ()) if plan is None or wrong is not None else (plan.payload, tuple(plan.holds))

    def never_ran(self, plan: StepPlan) -> None:
        """The step of `plan` did not reach the workers: nothing of its transfers has happened."""
        if self.connector is None or plan.transfers is None:
            return
        loads, holds = plan.transfers.loads, frozenset(plan.transfers.holds)
        blocks = plan.transfers.sync_blocks.union(*loads.values())
        self._report(
            TransferReport(frozenset(loads), holds, blocks, failed_holds=holds), self._loads.of_step(plan.step)
        )

    def landed(self, plan: StepPlan, result: StepResult | None) -> None:
        """A step's report is in `result`; None if the step has failed."""
        if self.connector is None:
            return
        for fault in result.transfer_faults if result is not None else ():
            self.connector.fault(fault)
        report: object = result.transfers if result is not None else None
        sync = self._loads.take_step(plan.step)
        if isinstance(report, TransferReport):
            self._report(report, sync)
        else:
            self._in_doubt |= plan.transfers is not None and plan.transfers.in_doubt is not None
            if report is not None:
                self.connector.fault(f"report() returned {shown(report)}")
            for load in sync:
                load.fail()
        for load in sync:
            self._ends.end(load)

    def _report(self, report: TransferReport, sync: list[PendingLoad]) -> None:
        assert self.connector is not None
        if report:
            self.connector.update(report)
        unknown = self._loads.fail(report.failed_blocks, sync)
        unknown |= self._ends.end_reported(report.loaded)
        unknown |= self.holds.release(report.released)
        if (report.released or report.loaded) and self.has_more_to_store:
            self._step_wanted = True
        if unknown:
            self.connector.fault(f"report() named what it was never given: {shown(unknown)}")

    def take_ended(self) -> list[EndedLoad]:
        """Loads that are over for their requests, see `LoadEnds.take`."""
        return self._ends.take()

    # What becomes of requests

    def give_up(self, request: Request) -> None:
        """`request` waits for the connector no longer."""
        self.requests.unpark(request)
        self._ends.give_up(request)

    def finished(self, request: Request) -> dict[str, Any] | None:
        """`request` has ended and is about to give its blocks back. Returns what its client is to have."""
        if self.connector is None:
            return None
        self.requests.forget(request)
        tables = tables_of(self._kv, request)
        retention = self.connector.request_finished(SequenceView(request, self._kv), tables)
        if retention.holds:
            self._step_wanted = True
            blocks = [block for table in tables for block in table]
            wrong = self.holds.add(dict.fromkeys(retention.holds, blocks))
            if wrong is not None:
                self.connector.fault(f"request_finished(): {wrong}")
        return None if retention.params is None else dict(retention.params)

    def preempted(self, request: Request) -> None:
        """`request` is about to lose its blocks."""
        if self.connector is not None:
            self.connector.preempted(SequenceView(request, self._kv))

    def stats(self) -> dict[str, float]:
        """The connector's own numbers."""
        return {} if self.connector is None else self.connector.stats()

    def reset(self) -> None:
        """The prefix cache was emptied."""
        if self.connector is not None:
            self.connector.reset()

    def close(self) -> None:
        """Close the connector's half. May be called twice."""
        if self.connector is not None:
            self.connector.close()
