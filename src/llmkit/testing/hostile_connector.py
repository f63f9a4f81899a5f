"""Connectors that make trouble: one that keeps to the contract but fails and dawdles, one that breaks the contract."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar, cast

from llmkit.hookspecs.connector import (
    Connector,
    LoadOffer,
    Retention,
    SchedulerContext,
    StepView,
    TransferPlan,
    TransferReport,
    TransferView,
    WorkerContext,
)
from llmkit.testing.memory_connector import MemoryScheduler, MemoryStore, MemoryWorker

T = TypeVar("T")


class FlakyConnector(Connector):
    """Answers late, offers less than it has, loads now or later, fails in single blocks; all at random, and all of it
    allowed. `trouble`: share of the occasions on which it does."""

    def __init__(self, store: MemoryStore, seed: int = 0, trouble: float = 0.3) -> None:
        self.store = store
        self._random = random.Random(seed)
        self._trouble = trouble

    def scheduler_half(self, context: SchedulerContext) -> FlakyScheduler:
        return FlakyScheduler(self.store, context, self._random, self._trouble)

    def worker_half(self, context: WorkerContext) -> FlakyWorker:
        return FlakyWorker(self.store, context, self._random, self._trouble)


class FlakyScheduler(MemoryScheduler):
    """The deciding half of FlakyConnector."""

    def __init__(self, store: MemoryStore, context: SchedulerContext, rng: random.Random, trouble: float) -> None:
        super().__init__(store, context, asynchronous=False)
        self._random = rng
        self._trouble = trouble

    def offer(self, request: TransferView, num_computed_tokens: int) -> LoadOffer | None:
        if self._random.random() < self._trouble:
            return None
        offer = super().offer(request, num_computed_tokens)
        assert offer is not None
        size = self._context.layout.block_size
        tokens = offer.num_tokens
        if tokens and self._random.random() < self._trouble and len(self._context.layout.groups) == 1:
            tokens = self._random.randint(0, tokens // size) * size
        return LoadOffer(tokens, asynchronous=self._random.random() < 0.5)

    def request_finished(self, request: TransferView, block_ids: Sequence[Sequence[int]]) -> Retention:  # noqa: ARG002
        return Retention(params={"request": request.request_id} if self._random.random() < self._trouble else None)


class FlakyWorker(MemoryWorker):
    """The moving half of FlakyConnector."""

    def __init__(self, store: MemoryStore, context: WorkerContext, rng: random.Random, trouble: float) -> None:
        super().__init__(store, context, delay=0)
        self._random = rng
        self._trouble = trouble

    def start_load(self, payload: Any) -> None:
        self._delay = self._random.choice([0, 0, 1, 2, 5])
        super().start_load(payload)

    def is_lost(self, block_hash: bytes) -> bool:
        return self._random.random() < self._trouble / 4 or super().is_lost(block_hash)


class HostileConnector(FlakyConnector):
    """Raises, answers with nonsense, loses reports and invents others, at random. `honesty`: share of the calls that it
    does as it should. What it never does is to move bytes that it was not told to move, as nothing could stop that."""

    def __init__(self, store: MemoryStore, seed: int = 0, honesty: float = 0.9) -> None:
        super().__init__(store, seed)
        self._honesty = honesty

    def scheduler_half(self, context: SchedulerContext) -> HostileScheduler:
        return HostileScheduler(self.store, context, self._random, self._honesty)

    def worker_half(self, context: WorkerContext) -> HostileWorker:
        return HostileWorker(self.store, context, self._random, self._honesty)


class _Liar:
    def __init__(self, rng: random.Random, honesty: float) -> None:
        self.random = rng
        self._honesty = honesty

    def maybe_raise(self) -> None:
        if self.random.random() > self._honesty:
            raise RuntimeError("a connector that fails")

    def answer(self, right: T, *wrong: Any) -> T:
        """`right`, or something that makes no sense."""
        if self.random.random() < self._honesty:
            return right
        return cast("T", self.random.choice([None, 7, [], object(), *wrong]))


class HostileScheduler(FlakyScheduler):
    """The deciding half of HostileConnector."""

    def __init__(self, store: MemoryStore, context: SchedulerContext, rng: random.Random, honesty: float) -> None:
        super().__init__(store, context, rng, trouble=0.2)
        self._liar = _Liar(rng, honesty)

    def offer(self, request: TransferView, num_computed_tokens: int) -> LoadOffer | None:
        self._liar.maybe_raise()
        right = super().offer(request, num_computed_tokens)
        return self._liar.answer(right, LoadOffer(-4), LoadOffer(10**9), LoadOffer(3), LoadOffer("many"))  # type: ignore[arg-type]

    def plan_transfers(self, step: StepView) -> TransferPlan | None:
        self._liar.maybe_raise()
        right = super().plan_transfers(step)
        nonsense: list[Any] = [{5: [10**9]}, {"a": [1]}, {7: 3}, [1], {1: (1, 2, 3)}]
        holds = self._liar.random.choice(nonsense)
        return self._liar.answer(right, TransferPlan("nonsense", {}), TransferPlan(None, holds))

    def request_finished(self, request: TransferView, block_ids: Sequence[Sequence[int]]) -> Retention:
        self._liar.maybe_raise()
        right = super().request_finished(request, block_ids)
        return self._liar.answer(right, Retention((1, 2)), Retention("x"), Retention((), 5))  # type: ignore[arg-type]

    def preempted(self, request: TransferView) -> None:  # noqa: ARG002
        self._liar.maybe_raise()

    def update(self, report: TransferReport) -> None:
        self._liar.maybe_raise()
        super().update(report)

    def close(self) -> None:
        self._liar.maybe_raise()


class HostileWorker(FlakyWorker):
    """The moving half of HostileConnector."""

    def __init__(self, store: MemoryStore, context: WorkerContext, rng: random.Random, honesty: float) -> None:
        super().__init__(store, context, rng, trouble=0.2)
        self._liar = _Liar(rng, honesty)

    def start_load(self, payload: Any) -> None:
        self._liar.maybe_raise()
        super().start_load(payload)

    def wait_for_layer(self, layer: int) -> None:  # noqa: ARG002
        if self._random.random() < 0.1:
            self._jobs.clear()  # a step that raises has no transfers any more
            raise RuntimeError("a connector that fails")

    def wait(self, seconds: float) -> None:  # noqa: ARG002
        self._liar.maybe_raise()

    def report(self) -> TransferReport:
        right = super().report()
        self._liar.maybe_raise()  # what has finished is never told
        blocks = frozenset({self._random.randrange(10**6)})
        wrong = TransferReport(right.loaded, right.released, right.failed_blocks | blocks)
        invented = TransferReport(right.loaded | blocks, right.released | blocks, right.failed_blocks)
        return self._liar.answer(right, wrong, invented, TransferReport(5, "x"))  # type: ignore[arg-type]

    def close(self) -> None:
        super().close()
        self._liar.maybe_raise()
