"""What is asked of a connector."""

from __future__ import annotations

import itertools

import torch

from llmkit.hookspecs.connector import SchedulerContext, TransferReport, WorkerContext
from llmkit.kv_cache.layout import KVCacheLayout, KVGroup, KVSpec
from llmkit.testing.conformance.target import Conformance


def small_layout(num_blocks: int = 9, block_size: int = 4) -> KVCacheLayout:
    """Two layers of full attention, pages as large as blocks."""
    return KVCacheLayout((KVGroup(KVSpec(2, 8, torch.float32), (0, 1)),), num_blocks, block_size, block_size)


def test_halves_are_independent_and_close_twice(conformance: Conformance) -> None:
    layout = small_layout()
    worker = conformance.create().worker_half(WorkerContext(0, 1, "kit", "both"))
    worker.register(layout, [torch.zeros(layout.num_blocks, 2, 2, 4, 8) for _ in range(2)])
    assert worker.report() == TransferReport(), "nothing was asked for, so there is nothing to report"
    new_id = itertools.count(1).__next__
    scheduler = conformance.create().scheduler_half(SchedulerContext(layout, "kit", 1, 64, "both", new_id))
    scheduler.reset()
    for half in (worker, scheduler):
        half.close()
        half.close()
