"""A connector on trial in a whole engine with a fake model; `llmkit.testing.connector_rig` has one on real tensors."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import torch

from llmkit.hookspecs.connector import (
    Connector,
    SchedulerConnector,
    SchedulerContext,
    WorkerConnector,
    WorkerContext,
)
from llmkit.hookspecs.scheduler import RequestView, SchedulerPolicy
from llmkit.kv_cache.layout import KVCacheLayout, KVGroup, KVSpec
from llmkit.testing.scheduling import SchedulingHarness


class ArrivalOrder(SchedulerPolicy):
    """First come, first served."""

    def __init__(self) -> None:
        self._queue: deque[RequestView] = deque()

    def add(self, request: RequestView) -> None:
        self._queue.append(request)

    def requeue(self, request: RequestView) -> None:
        self._queue.appendleft(request)

    def peek(self) -> RequestView | None:
        return self._queue[0] if self._queue else None

    def pop(self) -> RequestView:
        return self._queue.popleft()

    def remove(self, request: RequestView) -> None:
        if request in self._queue:
            self._queue.remove(request)

    def __len__(self) -> int:
        return len(self._queue)


class SeparateHalves(Connector):
    """Builds each half with a connector of its own, as if in two processes."""

    def __init__(self, create: Callable[[], Connector]) -> None:
        self._create = create

    def scheduler_half(self, context: SchedulerContext) -> SchedulerConnector:
        return self._create().scheduler_half(context)

    def worker_half(self, context: WorkerContext) -> WorkerConnector:
        return self._create().worker_half(context)


def random_layout(rng: random.Random, num_blocks: int = 40) -> KVCacheLayout:
    """One or two KV groups of one to three layers; blocks of one or two pages."""
    page = rng.choice([1, 2, 4])
    spec = (rng.choice([1, 2]), rng.choice([4, 8]), rng.choice([torch.float32, torch.bfloat16, torch.float16]))
    windows = rng.choice([(None,), (None,), (None, 6), (3,)])
    size = rng.randint(1, 3)
    groups = tuple(
        KVGroup(KVSpec(*spec, window), tuple(range(g * size, (g + 1) * size))) for g, window in enumerate(windows)
    )
    return KVCacheLayout(groups, num_blocks, page * rng.choice([1, 2]), page)


def check_connector(create: Callable[[], Connector], seed: int = 0, scenarios: int = 6) -> int:
    """Conformance of a connector in a whole engine with a fake model: under random load, aborts and preemption in a
    tiny cache all requests are answered right, nothing stays held, and the core finds no fault. Returns the tokens
    loaded.

    Raises AssertionError.
    """
    loaded = 0
    for number in range(scenarios):
        rng = random.Random(seed * 1_000_003 + number)
        harness = SchedulingHarness(
            ArrivalOrder(),
            num_blocks=rng.randint(12, 24),
            max_num_batched_tokens=rng.choice([7, 16, 64]),
            max_num_seqs=rng.randint(1, 5),
            max_concurrent_steps=rng.choice([1, 2]),
            windows=rng.choice([(None,), (None,), (None, 6), (3,)]),
            connector=SeparateHalves(create),
        )
        for request in range(rng.randint(6, 12)):
            prompt = [rng.randint(0, 1) for _ in range(rng.randint(8, 24))]
            harness.add(f"request-{request}", prompt, rng.randint(1, 8), n=rng.choice([1, 1, 2]))
            if rng.random() < 0.2:
                harness.core.abort([f"request-{rng.randrange(request + 1)}"])
            for _ in range(rng.randint(0, 3)):
                harness.step()
        harness.run()
        harness.check_answers()
        assert harness.connector is not None
        assert not harness.connector.breaker.num_faults, harness.connector.breaker.last_fault
        loaded += harness.core.stats().external_hit_tokens
        harness.core.close()
    return loaded
