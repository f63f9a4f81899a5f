"""The deciding half: asks all members, gives each its own part of a step, and tells them what concerns them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmkit.hookspecs.connector import (
    FilledBlock,
    Load,
    LoadOffer,
    Retention,
    ScheduledRow,
    SchedulerConnector,
    SchedulerContext,
    StepView,
    TransferPlan,
    TransferReport,
    TransferView,
)
from llmkit.scheduling.guarded_connector import GuardedConnector
from llmkit.scheduling.plan import StepTransfers

_NOTHING = LoadOffer(0)


@dataclass(frozen=True, slots=True)
class MemberStep:
    """A step as one member sees it: with its own loads."""

    whole: StepView
    loads: Sequence[Load]

    @property
    def step(self) -> int:
        return self.whole.step

    @property
    def rows(self) -> Sequence[ScheduledRow]:
        return self.whole.rows

    @property
    def filled(self) -> Sequence[FilledBlock]:
        return self.whole.filled

    def cached_block(self, group: int, block_hash: bytes) -> int | None:
        return self.whole.cached_block(group, block_hash)


class MultiScheduler(SchedulerConnector):
    """Remembers of every request which member's offer was the best, and which member holds and loads what."""

    def __init__(self, context: SchedulerContext, members: Sequence[GuardedConnector]) -> None:
        self._context = context
        self._members = tuple(members)
        self._best: dict[int, int] = {}
        self._loading: dict[int, tuple[int, frozenset[int]]] = {}
        self._holding: dict[int, tuple[int, frozenset[int]]] = {}

    def problems(self, params: Mapping[str, Any]) -> list[str]:
        return [problem for member in self._members for problem in member.problems(params)]

    def offer(self, request: TransferView, num_computed_tokens: int) -> LoadOffer | None:
        size = self._context.layout.block_size
        offers: list[LoadOffer] = []
        for member in self._members:
            offer = member.offer(request, num_computed_tokens, size)
            if offer is None:
                return None
            offers.append(offer)
        best = max(range(len(offers)), key=lambda i: (offers[i].num_tokens, -i))
        self._best[request.sequence_number] = best
        return offers[best] if offers[best].num_tokens else _NOTHING

    def plan_transfers(self, step: StepView) -> TransferPlan | None:
        loads: list[list[Load]] = [[] for _ in self._members]
        for load in step.loads:
            loads[self._best.get(load.request.sequence_number, 0)].append(load)
        payloads: list[StepTransfers | None] = []
        holds: dict[int, Sequence[int]] = {}
        for number in range(len(self._members)):
            plan = self._plan_of(number, MemberStep(step, loads[number]), holds)
            if plan is not None:
                holds |= plan.holds
            payloads.append(self._transfers(number, plan, loads[number]))
        if all(payload is None for payload in payloads):
            return None
        return TransferPlan(tuple(payloads), holds)

    def _plan_of(self, number: int, step: MemberStep, holds: Mapping[int, Sequence[int]]) -> TransferPlan | None:
        """What a member plans; None if it may not hold so much beside the others."""
        plan = self._members[number].plan_transfers(step)
        if plan is None:
            return None
        before = [blocks for _, blocks in self._holding.values()]
        held = {block for blocks in (*before, *holds.values(), *plan.holds.values()) for block in blocks}
        if len(held - {0}) > self._context.max_held_blocks:
            refused = frozenset(plan.holds)
            self._members[number].update(TransferReport(released=refused, failed_holds=refused))
            return None
        for hold_id, blocks in plan.holds.items():
            self._holding[hold_id] = (number, frozenset(blocks))
        return plan

    def _transfers(self, number: int, plan: TransferPlan | None, loads: Sequence[Load]) -> StepTransfers | None:
        if plan is None and not loads:
            return None
        blocks = {load.load_id: self._blocks_of(load) for load in loads}
        asynchronous = {load.load_id: blocks[load.load_id] for load in loads if load.asynchronous}
        for load_id, written in asynchronous.items():
            self._loading[load_id] = (number, written)
        sync = frozenset().union(*(blocks[load.load_id] for load in loads if not load.asynchronous))
        return StepTransfers(
            None if plan is None else plan.payload, sync, asynchronous, () if plan is None else tuple(plan.holds)
        )

    def _blocks_of(self, load: Load) -> frozenset[int]:
        first = load.first_token // self._context.layout.block_size
        return frozenset(block for table in load.block_ids for block in table[first:] if block)

    def has_more_to_store(self) -> bool:
        return any(member.has_more_to_store() for member in self._members)

    def update(self, report: TransferReport) -> None:
        """Each member hears of its own loads, holds and counts. A block that has failed is written by one member at a
        time, and means nothing to the others."""
        for part, fault in report.part_faults:
            if part.isdecimal():
                self._members[int(part)].fault(fault)
        loaded, released = self._owned(report.loaded, self._loading), self._owned(report.released, self._holding)
        for number, member in enumerate(self._members):
            prefix = f"{number}."
            told = TransferReport(
                frozenset(loaded[number]),
                frozenset(released[number]),
                report.failed_blocks,
                {name.removeprefix(prefix): n for name, n in report.counts.items() if name.startswith(prefix)},
                report.failed_holds & released[number],
                tuple(
                    (part.removeprefix(prefix), fault) for part, fault in report.part_faults if part.startswith(prefix)
                ),
            )
            if told:
                member.update(told)

    def _owned(self, ids: Iterable[int], owners: dict[int, tuple[int, frozenset[int]]]) -> list[set[int]]:
        """Of these ids, which are over, those of each member."""
        mine: list[set[int]] = [set() for _ in self._members]
        for id_ in ids:
            owner = owners.pop(id_, None)
            if owner is not None:
                mine[owner[0]].add(id_)
        return mine

    def stats(self) -> Mapping[str, float]:
        return {
            f"{member.breaker.name}.{name}": number
            for member in self._members
            for name, number in member.stats().items()
        }

    def request_finished(self, request: TransferView, block_ids: Sequence[Sequence[int]]) -> Retention:
        self._best.pop(request.sequence_number, None)
        tables = tuple(tuple(table) for table in block_ids)
        blocks = frozenset(block for table in tables for block in table)
        holds: list[int] = []
        params: dict[str, Any] | None = None
        for number, member in enumerate(self._members):
            kept = member.request_finished(request, tables)
            holds += kept.holds
            for hold_id in kept.holds:
                self._holding[hold_id] = (number, blocks)
            if kept.params is not None:
                params = {**kept.params, **(params or {})}  # the first one's word counts
        return Retention(tuple(holds), params)

    def preempted(self, request: TransferView) -> None:
        for member in self._members:
            member.preempted(request)

    def reset(self) -> None:
        for member in self._members:
            member.reset()

    def close(self) -> None:
        for member in self._members:
            member.close()
