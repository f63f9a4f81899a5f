"""Both halves of a connector around real tensors, driven as an engine would."""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from llmkit.hookspecs.connector import (
    Connector,
    FilledBlock,
    Load,
    LoadOffer,
    Retention,
    SchedulerContext,
    TransferPlan,
    TransferReport,
    WorkerContext,
    max_held_blocks,
)
from llmkit.kv_cache.layout import KVCacheLayout
from llmkit.testing.trial_cache import TrialCache
from llmkit.testing.trial_sequence import TrialSequence

PATIENCE_S = 20.0
"""How long a connector may take for anything."""


@dataclass
class ConnectorRig:
    """Both halves of a connector on real tensors, in which every loaded block is checked (`TrialCache`).

    Assertions fail for whatever breaks the contract.
    """

    create: Callable[[], Connector]
    layout: KVCacheLayout
    fingerprint: str
    device: str = "cpu"
    cache: TrialCache = field(init=False)
    holds: dict[int, tuple[int, ...]] = field(default_factory=dict)
    pending: dict[int, Load] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.ids = itertools.count(1)
        self._steps = itertools.count()
        self.cache = TrialCache(self.layout, self.device)
        context = SchedulerContext(self.layout, self.fingerprint, 1, 4096, "both", self.ids.__next__)
        self.scheduler = self.create().scheduler_half(context)
        self.worker = self.create().worker_half(WorkerContext(0, 1, self.fingerprint, "both"))
        self.worker.register(self.layout, self.cache.tensors)

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
        sequence.tables = self.cache.take(columns, num_loaded)

    def begin(self, sequence: TrialSequence, offer: LoadOffer) -> Load:
        """Start loading what was offered into the blocks of `sequence`."""
        last = offer.num_tokens // self.layout.block_size
        tables = tuple(table[:last] for table in sequence.tables)
        load = Load(next(self.ids), sequence, 0, offer.num_tokens, tables, offer.asynchronous)
        for block in self._written(load):
            self.cache.write(block, None)
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
                    assert self.cache.holds_content(block, group, hashes[column]), f"block {block} holds other bytes"
        self.failed -= self._written(load)
        return usable * self.layout.block_size

    def compute(self, sequence: TrialSequence, num_loaded: int = 0) -> None:
        """Fill its blocks behind those that were loaded, and tell the connector."""
        filled = []
        for group, table in enumerate(sequence.tables):
            hashes = sequence.block_hashes()
            for column, content in enumerate(hashes):
                if column >= num_loaded // self.layout.block_size and table[column]:
                    self.cache.fill(table[column], group, content)
                    parent = hashes[column - 1] if column else None
                    filled.append(FilledBlock(group, table[column], content, column, parent))
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
        view = SimpleNamespace(
            step=next(self._steps),
            rows=(),
            loads=tuple(loads),
            filled=tuple(filled),
            cached_block=self.cache.cached_block,
        )
        plan = self.scheduler.plan_transfers(view)
        assert plan is not None or not loads, "a load was left out"
        if plan is not None:
            assert isinstance(plan, TransferPlan)
            for hold_id, blocks in plan.holds.items():
                self._hold(hold_id, blocks)
            held = {block for blocks in self.holds.values() for block in blocks}
            assert len(held) <= max_held_blocks(self.layout), "more blocks are held than may be"
            self.worker.start_load(pickle.loads(pickle.dumps(plan.payload)))
            for layer in range(len(self.cache.tensors)):
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
        """Until no load and no hold is left, and nothing more is to be stored."""
        self.until(lambda: not self.pending and not self.holds and not self.scheduler.has_more_to_store())

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()

    def _written(self, load: Load) -> set[int]:
        return {block for table in load.block_ids for block in table if block}

    def _hold(self, hold_id: int, blocks: Sequence[int]) -> None:
        assert hold_id not in self.holds, "a hold's id is used twice"
        assert not any(self.cache.is_free(block) for block in blocks), "a hold names blocks that nobody uses"
        self.holds[hold_id] = tuple(blocks)

    def _give_back(self, blocks: Sequence[int]) -> None:
        """Blocks that are in no hold, and in no load under way, are reused, and overwritten at once."""
        kept = {block for held in self.holds.values() for block in held}
        kept |= {block for load in self.pending.values() for block in self._written(load)}
        self.cache.give_back(set(blocks) - kept)
