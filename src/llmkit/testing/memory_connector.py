"""A connector that keeps blocks in a dictionary: the smallest complete one, for tests of the core and as an example.

    store = MemoryStore()
    registry.register("connector", "memory", memory_front_door(store, asynchronous=True))
    llm = LLM(..., connector="memory", registry=registry)

Both halves must be in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.hookspecs.connector import (
    Connector,
    Load,
    LoadOffer,
    SchedulerConnector,
    SchedulerContext,
    StepView,
    TransferPlan,
    TransferReport,
    TransferView,
    WorkerConnector,
    WorkerContext,
)
from llmkit.kv_cache.groups import loadable_blocks

if TYPE_CHECKING:
    import torch

    from llmkit.kv_cache.layout import KVCacheLayout

Key = tuple[str, int, bytes]
"""Fingerprint, KV group, content hash."""

Move = tuple[int, int, bytes]
"""KV group, block, content hash."""


@dataclass
class MemoryStore:
    """What has been stored: key → worker rank → bytes of the block in each layer of its group.

    fails: asked for each block that is loaded; True makes its load fail. num_resets: what was planned before the last
    one is not stored any more. num_saved, num_loaded: blocks so far, by
    worker 0.
    """

    blocks: dict[Key, dict[int, list[torch.Tensor]]] = field(default_factory=dict)
    fails: Callable[[bytes], bool] = lambda block_hash: False  # noqa: ARG005
    num_resets: int = 0
    num_saved: int = 0
    num_loaded: int = 0


@dataclass(frozen=True)
class MemoryTransfers:
    """The payload. saves: blocks to copy out, held under `hold_id`, unless the store has seen more than `num_resets`
    when it comes to that. loads: id, asynchronous or not, and the blocks."""

    saves: tuple[Move, ...] = ()
    hold_id: int | None = None
    num_resets: int = 0
    loads: tuple[tuple[int, bool, tuple[Move, ...]], ...] = ()


class MemoryConnector(Connector):
    """asynchronous: loads run over steps. delay: reports that pass before an asynchronous load or a store is done."""

    def __init__(self, store: MemoryStore, *, asynchronous: bool = False, delay: int = 0) -> None:
        self._store = store
        self._asynchronous = asynchronous
        self._delay = delay

    def scheduler_half(self, context: SchedulerContext) -> MemoryScheduler:
        return MemoryScheduler(self._store, context, self._asynchronous)

    def worker_half(self, context: WorkerContext) -> MemoryWorker:
        return MemoryWorker(self._store, context, self._delay)


def memory_front_door(store: MemoryStore, **options: Any) -> Any:
    """A front door for `Registry.register`."""

    @hookimpl
    def llmkit_connector() -> Connector:
        return MemoryConnector(store, **options)

    return SimpleNamespace(info=PluginInfo("blocks in a dictionary"), llmkit_connector=llmkit_connector)


class MemoryScheduler(SchedulerConnector):
    """Offers whatever prefix the store has, stores whatever is filled."""

    def __init__(self, store: MemoryStore, context: SchedulerContext, asynchronous: bool) -> None:
        self._store = store
        self._context = context
        self._asynchronous = asynchronous
        self._held: dict[int, int] = {}

    def offer(self, request: TransferView, num_computed_tokens: int) -> LoadOffer | None:
        layout = self._context.layout
        hashes = request.block_hashes((request.num_tokens - 1) // layout.block_size)
        cached = num_computed_tokens // layout.block_size
        available = [_Stored(self._store, self._context, group) for group in range(len(layout.groups))]
        blocks = loadable_blocks(layout, hashes, cached, available)
        return LoadOffer(blocks * layout.block_size, self._asynchronous)

    def plan_transfers(self, step: StepView) -> TransferPlan | None:
        key = self._context.fingerprint
        saves = tuple(
            (block.group, block.block_id, block.block_hash)
            for block in step.filled
            if (key, block.group, block.block_hash) not in self._store.blocks
        )
        saves = saves[: self._context.max_held_blocks - self._num_held]
        if not step.loads and not saves:
            return None
        hold_id = self._context.new_id() if saves else None
        if hold_id is not None:
            self._held[hold_id] = len(saves)
        loads = tuple(self._planned(load) for load in step.loads)
        payload = MemoryTransfers(saves, hold_id, self._store.num_resets, loads)
        return TransferPlan(payload, {} if hold_id is None else {hold_id: [block for _, block, _ in saves]})

    def _planned(self, load: Load) -> tuple[int, bool, tuple[Move, ...]]:
        size = self._context.layout.block_size
        first = load.first_token // size
        hashes = load.request.block_hashes(first + load.num_tokens // size)
        moves = tuple(
            (group, table[column], hashes[column])
            for group, table in enumerate(load.block_ids)
            for column in range(first, len(hashes))
            if table[column]
        )
        return load.load_id, load.asynchronous, moves

    @property
    def _num_held(self) -> int:
        return sum(self._held.values())

    def update(self, report: TransferReport) -> None:
        for hold_id in report.released:
            self._held.pop(hold_id, None)

    def reset(self) -> None:
        self._store.blocks.clear()
        self._store.num_resets += 1


class _Stored:
    """The contents of one KV group that every worker has stored."""

    def __init__(self, store: MemoryStore, context: SchedulerContext, group: int) -> None:
        self._store = store
        self._context = context
        self._group = group

    def __contains__(self, block_hash: object) -> bool:
        assert isinstance(block_hash, bytes)
        stored = self._store.blocks.get((self._context.fingerprint, self._group, block_hash), {})
        return len(stored) == self._context.world_size


@dataclass
class _Job:
    """A transfer that is done after `reports` more reports."""

    reports: int
    run: Callable[[], set[int]]
    load_id: int | None = None
    hold_id: int | None = None


class MemoryWorker(WorkerConnector):
    """Copies blocks between the cache and the store."""

    def __init__(self, store: MemoryStore, context: WorkerContext, delay: int) -> None:
        self._store = store
        self._context = context
        self._delay = delay
        self._jobs: list[_Job] = []
        self._failed: set[int] = set()

    def register(self, layout: KVCacheLayout, kv_caches: Sequence[torch.Tensor]) -> None:
        self._layout = layout
        self._caches = kv_caches

    def start_load(self, payload: Any) -> None:
        assert isinstance(payload, MemoryTransfers)
        for load_id, asynchronous, moves in payload.loads:
            if asynchronous:
                self._jobs.append(_Job(self._delay, partial(self._load, moves), load_id=load_id))
            else:
                self._failed |= self._load(moves)
        if payload.saves:
            save = partial(self._save, payload.saves, payload.num_resets)
            self._jobs.append(_Job(self._delay, save, hold_id=payload.hold_id))

    def report(self) -> TransferReport:
        done = [job for job in self._jobs if job.reports <= 0]
        self._jobs = [job for job in self._jobs if job.reports > 0]
        for job in self._jobs:
            job.reports -= 1
        failed, self._failed = self._failed, set()
        for job in done:
            failed |= job.run()
        return TransferReport(
            frozenset(job.load_id for job in done if job.load_id is not None),
            frozenset(job.hold_id for job in done if job.hold_id is not None),
            frozenset(failed),
        )

    def wait(self, seconds: float) -> None:
        """Nothing happens between reports."""

    def close(self) -> None:
        self._jobs.clear()
        self._caches = ()

    def is_lost(self, block_hash: bytes) -> bool:
        """Whether this block cannot be loaded."""
        return self._store.fails(block_hash)

    def _pages(self, layer: int, block: int) -> torch.Tensor:
        pages = self._layout.pages_per_block
        return self._caches[layer][block * pages : (block + 1) * pages]

    def _save(self, moves: Sequence[Move], num_resets: int) -> set[int]:
        if num_resets != self._store.num_resets:
            return set()
        for group, block, block_hash in moves:
            content = [self._pages(layer, block).clone() for layer in self._layout.groups[group].layers]
            key = (self._context.fingerprint, group, block_hash)
            self._store.blocks.setdefault(key, {})[self._context.rank] = content
            self._store.num_saved += self._context.rank == 0
        return set()

    def _load(self, moves: Sequence[Move]) -> set[int]:
        failed = set()
        for group, block, block_hash in moves:
            content = self._store.blocks.get((self._context.fingerprint, group, block_hash), {})
            if self.is_lost(block_hash) or self._context.rank not in content:
                failed.add(block)
                continue
            for layer, values in zip(self._layout.groups[group].layers, content[self._context.rank], strict=True):
                self._pages(layer, block).copy_(values)
            self._store.num_loaded += self._context.rank == 0
        return failed
