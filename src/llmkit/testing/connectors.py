"""A connector on trial: its halves around real tensors of any layout, and around a whole engine with a fake model."""

from __future__ import annotations

import hashlib
import itertools
import math
import pickle
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from llmkit.hookspecs.connector import (
    Connector,
    FilledBlock,
    Load,
    LoadOffer,
    Retention,
    SchedulerConnector,
    SchedulerContext,
    TransferPlan,
    TransferReport,
    WorkerConnector,
    WorkerContext,
)
from llmkit.hookspecs.scheduler import RequestView, SchedulerPolicy
from llmkit.kv_cache.groups import make_group_managers
from llmkit.kv_cache.hashing import block_hashes
from llmkit.kv_cache.layout import KVCacheLayout, KVGroup, KVSpec
from llmkit.testing.scheduling import SchedulingHarness

PATIENCE_S = 20.0
"""How long a connector may take for anything."""


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


@dataclass(eq=False)
class TrialSequence:
    """A sequence as a connector sees it: `llmkit.hookspecs.connector.TransferView`."""

    tokens: list[int]
    sequence_number: int
    block_size: int
    tables: tuple[tuple[int, ...], ...] = ()
    kv_transfer_params: Mapping[str, Any] | None = None
    cache_salt: str | None = None
    priority: int = 0
    arrival_time: float = 0.0
    user: str | None = None
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    max_tokens: int = 1
    index: int = 0
    extra_args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def request_id(self) -> str:
        return f"request-{self.sequence_number}"

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def token_ids(self, first: int = 0, last: int | None = None) -> list[int]:
        return self.tokens[first:last]

    def block_hashes(self, num_blocks: int | None = None) -> list[bytes]:
        return block_hashes(self.tokens, self.block_size)[:num_blocks]

    def block_ids(self) -> tuple[tuple[int, ...], ...]:
        return self.tables


@dataclass
class ConnectorRig:
    """Both halves of a connector on real tensors. What a block holds is a function of group and content hash, so that
    every loaded block can be checked; all others must stay as they are.

    Assertions fail for whatever breaks the contract.
    """

    create: Callable[[], Connector]
    layout: KVCacheLayout
    fingerprint: str
    device: str = "cpu"
    caches: list[torch.Tensor] = field(init=False)
    holds: dict[int, tuple[int, ...]] = field(default_factory=dict)
    pending: dict[int, Load] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.ids = itertools.count(1)
        self._steps = itertools.count()
        self._free = list(range(1, self.layout.num_blocks))
        self.caches = self._tensors()
        context = SchedulerContext(self.layout, self.fingerprint, 1, 4096, "both", self.ids.__next__)
        self.scheduler = self.create().scheduler_half(context)
        self.worker = self.create().worker_half(WorkerContext(0, 1, self.fingerprint, "both"))
        self.worker.register(self.layout, self.caches)

    def _tensors(self) -> list[torch.Tensor]:
        """Layers of different groups share storage, as in the engine."""
        layout, tensor_of, group_of = self.layout, self.layout.tensor_of_layer(), self.layout.group_of_layer()
        spec = layout.groups[0].spec
        shape = (layout.num_blocks * layout.pages_per_block, 2, spec.num_kv_heads, layout.page_size, spec.head_size)
        storages = [torch.zeros(shape, dtype=spec.dtype, device=self.device) for _ in range(layout.num_tensors)]
        return [storages[tensor_of[layer]] for layer in sorted(group_of)]

    def sequence(self, tokens: Sequence[int]) -> TrialSequence:
        return TrialSequence(list(tokens), next(self.ids), self.layout.block_size)

    # What an engine does

    def offer(self, sequence: TrialSequence, num_cached_tokens: int = 0) -> LoadOffer:
        """The connector's answer, asked for until there is one."""
        deadline = time.monotonic() + PATIENCE_S
        while (offer := self.scheduler.offer(sequence, num_cached_tokens)) is None:
            assert time.monotonic() < deadline, "offer() has no answer for too long"
            time.sleep(0.001)
            self.step()
        assert isinstance(offer, LoadOffer)
        assert offer.num_tokens >= 0
        assert offer.num_tokens % self.layout.block_size == 0, "an offer must be whole blocks"
        return offer

    def take_blocks(self, sequence: TrialSequence, num_loaded: int = 0) -> None:
        """Blocks for all of its tokens; null ones where a window will have left before the loaded tokens end."""
        columns = -(-sequence.num_tokens // self.layout.block_size)
        managers = make_group_managers(self.layout.groups, self.layout.block_size)
        firsts = [manager.first_needed(num_loaded) if num_loaded else 0 for manager in managers]
        sequence.tables = tuple(
            tuple(0 if column < first else self._free.pop() for column in range(columns)) for first in firsts
        )

    def begin(self, sequence: TrialSequence, offer: LoadOffer) -> Load:
        """Start loading what was offered into the blocks of `sequence`."""
        last = offer.num_tokens // self.layout.block_size
        tables = tuple(table[:last] for table in sequence.tables)
        load = Load(next(self.ids), sequence, 0, offer.num_tokens, tables, offer.asynchronous)
        for block in self._written(load):
            self.write(block, None)
        if load.asynchronous:
            self.pending[load.load_id] = load
        self.step(loads=[load])
        return load

    def load(self, sequence: TrialSequence) -> int:
        """Load what the connector offers and check it; how many tokens are usable."""
        offer = self.offer(sequence)
        cut = min(offer.num_tokens, (sequence.num_tokens - 1) // self.layout.block_size * self.layout.block_size)
        self.take_blocks(sequence, cut)
        if not cut:
            return 0
        load = self.begin(sequence, LoadOffer(cut, offer.asynchronous))
        self.until(lambda: load.load_id not in self.pending)
        return self.check_loaded(load)

    def check_loaded(self, load: Load) -> int:
        """What is in the blocks of a load that has ended must be right, unless they are reported as failed; how many
        tokens come before the first that is."""
        hashes = load.request.block_hashes()
        usable = load.num_tokens // self.layout.block_size
        for group, table in enumerate(load.block_ids):
            for column, block in enumerate(table):
                if block in self.failed:
                    usable = min(usable, column)
                elif block:
                    assert self.holds_content(block, group, hashes[column]), f"block {block} holds other bytes"
        self.failed -= self._written(load)
        return usable * self.layout.block_size

    def compute(self, sequence: TrialSequence, num_loaded: int = 0) -> None:
        """Fill its blocks behind those that were loaded, and tell the connector."""
        filled = []
        for group, table in enumerate(sequence.tables):
            for column, content in enumerate(sequence.block_hashes()):
                if column >= num_loaded // self.layout.block_size and table[column]:
                    self.write(table[column], (group, content))
                    filled.append(FilledBlock(group, table[column], content, column))
        self.step(filled=filled)

    def finish(self, sequence: TrialSequence) -> None:
        """It ends; its blocks are reused at once, unless they are held."""
        retention = self.scheduler.request_finished(sequence, sequence.tables)
        assert isinstance(retention, Retention)
        blocks = [block for table in sequence.tables for block in table if block]
        for hold_id in retention.holds:
            self._hold(hold_id, blocks)
        self._give_back(blocks)
        sequence.tables = ()

    def serve(self, tokens: Sequence[int]) -> int:
        """A whole request, until nothing is under way; how many tokens were loaded."""
        sequence = self.sequence(tokens)
        loaded = self.load(sequence)
        self.compute(sequence, loaded)
        self.finish(sequence)
        self.settle()
        return loaded

    def step(self, loads: Sequence[Load] = (), filled: Sequence[FilledBlock] = ()) -> None:
        """A step: plan, transfers, the layers, the report."""
        view = SimpleNamespace(step=next(self._steps), rows=(), loads=tuple(loads), filled=tuple(filled))
        plan = self.scheduler.plan_transfers(view)
        assert plan is not None or not loads, "a load was left out"
        if plan is not None:
            assert isinstance(plan, TransferPlan)
            for hold_id, blocks in plan.holds.items():
                self._hold(hold_id, blocks)
            self.worker.start_load(pickle.loads(pickle.dumps(plan.payload)))
            for layer in range(len(self.caches)):
                self.worker.wait_for_layer(layer)
                self.worker.save_layer(layer)
            self.worker.wait_for_save()
        self.take_report()

    def take_report(self) -> None:
        """What has finished is noted, and checked for being what was asked for."""
        report = self.worker.report()
        assert isinstance(report, TransferReport)
        for load_id in report.loaded:
            assert self.pending.pop(load_id, None) is not None, "a load is reported that nobody waits for"
        self.failed |= report.failed_blocks
        for hold_id in report.released:
            assert hold_id in self.holds, "a hold is reported that there is none of"
            self._give_back(self.holds.pop(hold_id))
        if report or report.counts:
            self.scheduler.update(report)

    def until(self, condition: Callable[[], bool]) -> None:
        """Steps without rows, until `condition` holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "a transfer takes too long"
            self.worker.wait(0.01)
            self.step()

    def settle(self) -> None:
        """Until no load and no hold is left."""
        self.until(lambda: not self.pending and not self.holds)

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()

    # Bytes

    def pages(self, layer: int, block: int) -> torch.Tensor:
        count = self.layout.pages_per_block
        return self.caches[layer][block * count : (block + 1) * count]

    def write(self, block: int, content: tuple[int, bytes] | None) -> None:
        """The bytes of a group's content, or garbage, into a block."""
        tensors = self.layout.tensor_of_layer()
        layers = self.layout.groups[content[0]].layers if content else sorted(tensors)
        for layer in layers:
            self.pages(layer, block).copy_(self._bytes(layer, content[1]) if content else torch.tensor(-3.0))

    def holds_content(self, block: int, group: int, content: bytes) -> bool:
        return all(
            torch.equal(self.pages(layer, block).cpu(), self._bytes(layer, content))
            for layer in self.layout.groups[group].layers
        )

    def _bytes(self, layer: int, content: bytes) -> torch.Tensor:
        shape = self.pages(layer, 0).shape
        seed = hashlib.blake2b(content + bytes([layer]), digest_size=4).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed, "little"))
        return torch.rand(math.prod(shape), generator=generator).view(shape).to(self.caches[layer].dtype)

    def _written(self, load: Load) -> set[int]:
        return {block for table in load.block_ids for block in table if block}

    def _hold(self, hold_id: int, blocks: Sequence[int]) -> None:
        assert hold_id not in self.holds, "a hold's id is used twice"
        assert not set(blocks) & set(self._free), "a hold names blocks that nobody uses"
        self.holds[hold_id] = tuple(blocks)

    def _give_back(self, blocks: Sequence[int]) -> None:
        """Blocks that are in no hold, and in no load under way, are reused, and overwritten at once."""
        kept = {block for held in self.holds.values() for block in held}
        kept |= {block for load in self.pending.values() for block in self._written(load)}
        for block in blocks:
            if block and block not in kept and block not in self._free:
                self.write(block, None)
                self._free.append(block)


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
