from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmkit.hookspecs.connector import (
    FilledBlock,
    Load,
    SchedulerContext,
    TransferReport,
    WorkerContext,
    max_held_blocks,
)
from llmkit.kv_cache.hashing import block_hashes
from llmkit.kv_cache.layout import KVCacheLayout, KVGroup, KVSpec
from llmkit_connectors.offload.block_key import BlockKey, space_of
from llmkit_connectors.offload.connector import OffloadConnector
from llmkit_connectors.offload.options import OffloadOptions

PAYLOAD_BYTES = 1000
SPACE = space_of("a model", 0, 1)


def block_key(number: int, group: int = 0) -> BlockKey:
    return BlockKey(group, number.to_bytes(32, "big"))


def block_payload(key: BlockKey, size: int = PAYLOAD_BYTES) -> bytes:
    """The bytes of a block, which depend on its key alone."""
    return random.Random(f"{key.group}/{key.content_hash.hex()}").randbytes(size)


class Blocks:
    """Keys and payloads of blocks for the tests."""

    size, space = PAYLOAD_BYTES, SPACE
    key: Callable[..., BlockKey] = staticmethod(block_key)
    payload: Callable[..., bytes] = staticmethod(block_payload)


@pytest.fixture
def blocks() -> type[Blocks]:
    return Blocks


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


BLOCK_SIZE = 4
SPEC = KVSpec(num_kv_heads=2, head_size=8, dtype=torch.float32)
LAYOUT = KVCacheLayout((KVGroup(SPEC, (0, 1, 2)),), num_blocks=200, block_size=BLOCK_SIZE, page_size=2)


@dataclass(eq=False)
class Sequence_:
    """A sequence as the connector sees it; `tables` are its blocks."""

    tokens: list[int]
    sequence_number: int
    layout: KVCacheLayout
    tables: list[list[int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def block_hashes(self, num_blocks: int | None = None) -> list[bytes]:
        return block_hashes(self.tokens, self.layout.block_size)[:num_blocks]


class Rig:
    """Both halves of the connector, and just enough of an engine around them.

    The content of a block is a function of its hash, so whatever is loaded can be checked. A block that is free and not
    held is overwritten with garbage at once.
    """

    def __init__(self, options: OffloadOptions, fingerprint: str, layout: KVCacheLayout, device: str) -> None:
        self.layout = layout
        self.max_held = max_held_blocks(layout)
        self.ids = itertools.count(1)
        numbers = sorted(layout.tensor_of_layer())
        pages = layout.num_blocks * layout.pages_per_block
        storages = [
            torch.zeros(pages, 2, layout.page_size, SPEC.num_kv_heads, SPEC.head_size, device=device)
            for _ in range(layout.num_tensors)
        ]
        self.caches = [storages[layout.tensor_of_layer()[layer]] for layer in numbers]
        connector = OffloadConnector(options)
        self.scheduler: Any = connector.scheduler_half(
            SchedulerContext(layout, fingerprint, 1, 4096, "both", lambda: next(self.ids))
        )
        self.worker: Any = connector.worker_half(WorkerContext(0, 1, fingerprint, "both"))
        self.worker.register(layout, self.caches)
        self.free = list(range(1, layout.num_blocks))
        self.holds: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self.failed: set[int] = set()
        self.cached: dict[tuple[int, bytes], int] = {}
        self.kept: set[int] = set()
        self.step = 0

    # An engine, as far as it is needed

    def sequence(self, tokens: Sequence[int]) -> Sequence_:
        return Sequence_(list(tokens), next(self.ids), self.layout)

    def serve(self, tokens: Sequence[int], *, settle: bool = True) -> int:
        """Load what can be loaded for a prompt, check it, compute the rest, store that; how many tokens were loaded."""
        sequence = self.sequence(tokens)
        offer = self.offer(sequence)
        columns = len(tokens) // self.layout.block_size
        sequence.tables = [[self.take() for _ in range(columns)] for _ in self.layout.groups]
        num_loaded = self.load(sequence, offer)
        self.compute(sequence, num_loaded // self.layout.block_size)
        self.finish(sequence)
        if settle:
            self.settle()
        return num_loaded

    def offer(self, sequence: Sequence_, num_cached: int = 0) -> int:
        """Tokens that are offered, asked for until there is an answer."""
        while (offer := self.scheduler.offer(sequence, num_cached)) is None:
            time.sleep(0.001)
        assert offer.num_tokens % self.layout.block_size == 0
        assert offer.num_tokens < len(sequence.tokens)
        return offer.num_tokens

    def load(self, sequence: Sequence_, num_tokens: int) -> int:
        """Tokens of a prefix whose blocks were loaded and are right."""
        if not num_tokens:
            return 0
        load_id = next(self.ids)
        tables = tuple(tuple(table) for table in sequence.tables)
        self.plan(loads=[Load(load_id, sequence, 0, num_tokens, tables, True)])
        self.until(lambda: load_id in self.ended)
        hashes = sequence.block_hashes()
        usable = num_tokens // self.layout.block_size
        for group, table in enumerate(sequence.tables):
            for column, block in enumerate(table[: num_tokens // self.layout.block_size]):
                if block in self.failed:
                    usable = min(usable, column)
                elif block:
                    self.check(group, block, hashes[column])
        self.failed -= {block for table in sequence.tables for block in table}
        return usable * self.layout.block_size

    def compute(self, sequence: Sequence_, first: int, last: int | None = None) -> None:
        """Fill the blocks of the columns from `first` on, before `last`, and tell the connector with the next step."""
        filled = []
        for group, table in enumerate(sequence.tables):
            hashes = sequence.block_hashes()
            for column in range(first, len(hashes) if last is None else last):
                self.write(group, table[column], self.content(group, hashes[column]))
                parent = hashes[column - 1] if column else None
                filled.append(FilledBlock(group, table[column], hashes[column], column, parent))
                self.cached[group, hashes[column]] = table[column]
        self.plan(filled)

    def plan(self, filled: Sequence[FilledBlock] = (), loads: Sequence[Load] = ()) -> None:
        self.step += 1
        step = SimpleNamespace(
            step=self.step, rows=(), loads=tuple(loads), filled=tuple(filled), cached_block=self.cached_block
        )
        plan = self.scheduler.plan_transfers(step)
        if plan is not None:
            assert not set(plan.holds) & set(self.holds)
            assert sum(map(len, [*plan.holds.values(), *self.holds.values()])) <= self.max_held
            self.holds |= {hold: list(blocks) for hold, blocks in plan.holds.items()}
            self.worker.start_load(plan.payload)

    def cached_block(self, group: int, block_hash: bytes) -> int | None:
        return self.cached.get((group, block_hash))

    def finish(self, sequence: Sequence_) -> None:
        assert not self.scheduler.request_finished(sequence, sequence.tables).holds
        for table in sequence.tables:
            for block in table:
                if block and not self.in_use(block):
                    self.give_back(block)

    def settle(self) -> None:
        """Until nothing is under way."""
        self.until(lambda: not self.holds and not self.scheduler.has_more_to_store())

    def until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        self.take_report()
        while not condition():
            assert time.monotonic() < deadline, "it takes too long"
            self.worker.wait(0.05)
            self.take_report()

    def take_report(self) -> None:
        report: TransferReport = self.worker.report()
        if not report:
            return
        self.scheduler.update(report)
        self.ended |= report.loaded
        self.failed |= report.failed_blocks
        for hold in report.released:
            for block in self.holds.pop(hold):
                if not self.in_use(block):
                    self.give_back(block)
        if self.scheduler.has_more_to_store():
            self.plan()

    def in_use(self, block: int) -> bool:
        """Whether it is held, or in `kept`: the blocks that the cache has no other use for yet."""
        return any(block in held for held in self.holds.values()) or block in self.kept

    # Blocks

    def take(self) -> int:
        return self.free.pop(0)

    def give_back(self, block: int) -> None:
        assert block not in self.free
        self.free.append(block)
        self.cached = {content: other for content, other in self.cached.items() if other != block}
        pages = self.layout.pages_per_block
        for cache in self.caches:
            cache[block * pages : (block + 1) * pages] = float("nan")

    def content(self, group: int, content_hash: bytes) -> torch.Tensor:
        shape = self.caches[0][: self.layout.pages_per_block].shape
        generator = torch.Generator().manual_seed(int.from_bytes(content_hash[:7], "little") + group)
        return torch.rand((len(self.layout.groups[group].layers), *shape), generator=generator)

    def write(self, group: int, block: int, content: torch.Tensor) -> None:
        pages = self.layout.pages_per_block
        for layer, part in zip(self.layout.groups[group].layers, content, strict=True):
            self.caches[layer][block * pages : (block + 1) * pages] = part

    def check(self, group: int, block: int, content_hash: bytes) -> None:
        pages = self.layout.pages_per_block
        for layer, part in zip(self.layout.groups[group].layers, self.content(group, content_hash), strict=True):
            found = self.caches[layer][block * pages : (block + 1) * pages].cpu()
            assert torch.equal(found, part), "a wrong byte"

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    """Builds rigs; host_blocks and file_blocks are limits in blocks."""
    made = []

    def make(
        *,
        host_blocks: int = 64,
        file_blocks: int | None = None,
        fingerprint: str = "a model",
        layout: KVCacheLayout = LAYOUT,
        device: str = "cpu",
        **options: Any,
    ) -> Rig:
        gib = 1 << 30
        file_gib = None if file_blocks is None else file_blocks * (layout.block_bytes + 100) / gib
        settings = {"host_gib": host_blocks * layout.block_bytes / gib, "file_gib": file_gib, "num_threads": 2}
        made.append(Rig(OffloadOptions.model_validate(settings | options), fingerprint, layout, device))
        return made[-1]

    yield make
    for rig in made:
        rig.close()
