"""What a connector learns of filled blocks, and what it shows of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmkit.execution.worker_transfers import ReportMerger
from llmkit.hookspecs.connector import (
    Connector,
    LoadOffer,
    SchedulerConnector,
    TransferPlan,
    TransferReport,
    WorkerConnector,
)
from llmkit.testing.scheduling import SchedulingHarness
from llmkit_schedulers.fcfs import FcfsPolicy


class Counting(Connector, SchedulerConnector, WorkerConnector):
    """Both halves in one: moves nothing, counts steps with a payload in the worker and filled blocks beside the
    scheduler."""

    def __init__(self) -> None:
        self.filled: list[Any] = []
        self.total = 0
        self.new = 0

    def scheduler_half(self, context: Any) -> SchedulerConnector:  # noqa: ARG002
        return self

    def worker_half(self, context: Any) -> WorkerConnector:  # noqa: ARG002
        return self

    def register(self, layout: Any, kv_caches: Any) -> None:
        pass

    def offer(self, request: Any, num_computed_tokens: int) -> LoadOffer:  # noqa: ARG002
        return LoadOffer(0)

    def plan_transfers(self, step: Any) -> TransferPlan:
        self.filled += step.filled
        return TransferPlan("count")

    def start_load(self, payload: Any) -> None:
        assert payload == "count"
        self.new += 1

    def report(self) -> TransferReport:
        new, self.new = self.new, 0
        return TransferReport(counts={"steps": new} if new else {})

    def update(self, report: TransferReport) -> None:
        self.total += report.counts["steps"]

    def stats(self) -> Mapping[str, float]:
        return {"filled": len(self.filled), "steps": self.total}

    def close(self) -> None:
        pass


def test_filled_blocks_know_the_one_before_them():
    connector = Counting()
    harness = SchedulingHarness(FcfsPolicy(), connector=connector, windows=(None, 9))
    harness.add("a", list(range(1, 23)), 8)
    harness.run()
    hashes = {(block.group, block.column): block.block_hash for block in connector.filled}
    assert len(hashes) >= 10
    for block in connector.filled:
        assert block.parent_hash == hashes.get((block.group, block.column - 1))
        assert (block.parent_hash is None) == (block.column == 0)


def test_numbers_of_both_halves_are_part_of_the_statistics():
    harness = SchedulingHarness(FcfsPolicy(), connector=Counting())
    assert harness.core.stats().connector == {"filled": 0, "steps": 0}
    harness.add("a", list(range(1, 23)), 4)
    harness.run()
    stats = harness.core.stats()
    assert stats.connector["filled"] == 6
    assert stats.connector["steps"] >= 4
    assert not stats.plugin_faults
    assert SchedulingHarness(FcfsPolicy()).core.stats().connector == {}


def test_numbers_that_are_none_are_a_fault_and_no_more():
    class Broken(Counting):
        def stats(self) -> Any:
            return {"filled": "many"}

    harness = SchedulingHarness(FcfsPolicy(), connector=Broken())
    assert harness.core.stats().connector == {}
    assert harness.connector.breaker.num_faults == 1


def test_counts_of_several_workers_are_added_up():
    merger = ReportMerger(2)
    one = TransferReport(counts={"files": 3, "bytes": 10})
    two = TransferReport(counts={"files": -1})
    assert merger.merge([one, two]).counts == {"files": 2, "bytes": 10}
    assert not merger.merge([TransferReport(), None])
