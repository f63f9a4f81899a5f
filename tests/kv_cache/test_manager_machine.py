"""The KV cache manager against a memory that remembers what was written, checked after every step.

The memory keeps, for every slot of every block, which group wrote it and for which tokens: the keys and values at a
position depend on all tokens up to it, so that is what must be found there later. Every step of a sequence
reads all positions its attention can see, through its own block table. LLMKIT_DEEP_TESTS=1 runs it for long.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llmkit.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from llmkit.kv_cache.hashing import BlockHasher, ExtraKey
from llmkit.kv_cache.layout import KVCacheLayout, KVGroup, KVSpec
from llmkit.kv_cache.manager import KVCacheManager, PrefixHit

DEEP = os.environ.get("LLMKIT_DEEP_TESTS") == "1"
MAX_MODEL_LEN = 40
TOKENS = st.sampled_from([1, 2])
BASES = ([1, 2] * 16, [1, 2, 2, 1, 1, 2, 1, 2, 2] * 4)
PROMPTS = st.builds(
    lambda base, cut, tail: [*base[:cut], *tail],
    st.sampled_from(BASES),
    st.integers(1, 32),
    st.lists(TOKENS, max_size=3),
)
"""Prompts that often begin alike."""
KEYS = st.sampled_from(
    [(), (), (), (), (ExtraKey("media", "m", (3, 5)),), (ExtraKey("media", "n", (3, 5)),), (ExtraKey("lora", "a"),)]
)
SALTS = st.sampled_from([None, None, None, None, "salt"])


@dataclass(eq=False)
class Sequence:
    """written: tokens in the memory, committed or not; committed: as of the last commit; hit: found at admission."""

    sequence_id: str
    token_ids: list[int]
    cache_salt: str | None = None
    extra_keys: tuple[ExtraKey, ...] = ()
    written: int = 0
    committed: int = 0
    hit: int = 0
    admissions: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def content(self, group: int, position: int) -> tuple[object, ...]:
        keys = tuple(key for key in self.extra_keys if key.span is None or key.span[0] <= position)
        return (group, self.cache_salt, keys, *self.token_ids[: position + 1])


class ManagerMachine(RuleBasedStateMachine):
    @initialize(
        windows=st.lists(st.sampled_from([None, None, 1, 2, 3, 5, 8, 13]), min_size=1, max_size=3),
        blocks_per_group=st.sampled_from([2, 4, 9, 17, 26, 40]),
        block_size=st.sampled_from([1, 2, 3, 4]),
        caching=st.sampled_from([True, True, True, False]),
        host_blocks=st.sampled_from([0, 3, 8, 60]),
        prompt=PROMPTS,
    )
    def start(
        self,
        windows: list[int | None],
        blocks_per_group: int,
        block_size: int,
        caching: bool,
        host_blocks: int,
        prompt: list[int],
    ) -> None:
        groups = tuple(KVGroup(KVSpec(1, 8, torch.float32, window), (i,)) for i, window in enumerate(windows))
        num_blocks = 1 + blocks_per_group * len(windows)
        layout = KVCacheLayout(groups, num_blocks, block_size, block_size, caching, host_blocks)
        self.windows, self.size, self.caching = windows, block_size, caching
        self.mirror: set[tuple[int, bytes]] = set()
        self.manager = KVCacheManager(layout, max_model_len=MAX_MODEL_LEN, on_event=self.on_event)
        self.hasher = BlockHasher(block_size)
        self.memory: dict[tuple[int, int], tuple[object, ...]] = {}
        self.count = self.last_reset = 0
        self.waiting = [Sequence(self.new_id(), prompt)]
        self.running: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.host: dict[tuple[int, int], tuple[object, ...]] = {}

    def on_event(self, event: KVEvent) -> None:
        """What a mirror of the cache would know."""
        if isinstance(event, AllBlocksCleared):
            self.mirror.clear()
            return
        named = {(event.group, block_hash) for block_hash in event.block_hashes}
        if isinstance(event, BlockStored):
            assert not named & self.mirror
            assert len(event.token_ids) == len(event.block_hashes) * self.size
            self.mirror |= named
        else:
            assert isinstance(event, BlockRemoved)
            assert named <= self.mirror
            self.mirror -= named

    # The device

    def slot(self, seq: Sequence, group: int, position: int) -> tuple[int, int]:
        block = self.manager.block_ids(seq)[group][position // self.size]
        assert block, f"position {position} of {seq.sequence_id} lies in the null block"
        return block, position % self.size

    def compute(self, seq: Sequence, upto: int) -> None:
        """Write the new positions, into blocks that nobody else holds, and read what each of them attends to."""
        for group, window in enumerate(self.windows):
            for position in range(seq.written, upto):
                block, offset = self.slot(seq, group, position)
                assert self.manager._pool.references(block) == 1, "a shared block is written"
                self.memory[block, offset] = seq.content(group, position)
            if upto > seq.written:
                first = 0 if window is None else max(0, seq.written - window + 1)
                for position in range(first, upto):
                    found = self.memory.get(self.slot(seq, group, position))
                    assert found == seq.content(group, position)
        seq.written = upto

    # The scheduler

    def new_id(self) -> str:
        self.count += 1
        return f"s{self.count}"

    @precondition(lambda self: len(self.waiting) < 4)
    @rule(tokens=PROMPTS, salt=SALTS, keys=KEYS)
    def add(self, tokens: list[int], salt: str | None, keys: tuple[ExtraKey, ...]) -> None:
        self.waiting.append(Sequence(self.new_id(), tokens, salt, keys))

    @rule(tokens=PROMPTS, salt=SALTS, keys=KEYS, steps=st.integers(1, 3))
    def run_whole_prompt(self, tokens: list[int], salt: str | None, keys: tuple[ExtraKey, ...], steps: int) -> None:
        """Admission with whatever is cached, a prefill in a few committed chunks, as far as there is room."""
        seq = Sequence(self.new_id(), tokens, salt, keys)
        self.waiting.append(seq)
        hit = self.manager.lookup(seq).num_tokens
        chunk = -(-(len(tokens) - hit) // steps)
        while seq.written < len(tokens):
            upto = min(len(tokens), max(seq.written, hit) + chunk)
            if seq in self.waiting:
                self.try_admit(seq, upto, use_cache=True)
            else:
                self.try_grow(seq, upto)
            if seq.written < upto:
                return
            self.manager.commit(seq, upto)
            seq.committed = upto

    def brute_force_hit(self, seq: Sequence) -> int:
        """Longest number of blocks after which every position in sight is found under an independent hash."""
        chain = self.hasher.chain(seq.cache_salt, seq.extra_keys)
        limit = (seq.num_tokens - 1) // self.size
        chain.extend(seq.token_ids, limit)

        def good(end: int) -> bool:
            for window, index in zip(self.windows, self.manager._pool.indices, strict=True):
                first = 0 if window is None else max(0, end * self.size - window + 1)
                if not all(chain.hashes[p // self.size] in index for p in range(first, end * self.size)):
                    return False
            return True

        return max(end for end in range(limit + 1) if good(end)) * self.size

    def check_hit(self, seq: Sequence, hit: PrefixHit) -> None:
        assert hit.num_tokens == (self.brute_force_hit(seq) if self.caching else 0)
        for group, blocks in enumerate(hit.blocks):
            assert len(blocks) * self.size == hit.num_tokens
            for position in range(hit.num_tokens):
                block = blocks[position // self.size]
                if block:
                    assert self.memory[block, position % self.size] == seq.content(group, position)

    def state(self) -> object:
        manager = self.manager
        tables = {name: [list(t) for t in state.tables] for name, state in manager._sequences.items()}
        return manager._pool.free_queue(), list(manager._pool._references), tables

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), use_cache=st.sampled_from([True, True, True, False]))
    def admit(self, data: st.DataObject, use_cache: bool) -> None:
        seq = data.draw(st.sampled_from(self.waiting))
        done = self.manager.lookup(seq).num_tokens if use_cache else 0
        self.try_admit(seq, data.draw(st.integers(done + 1, seq.num_tokens)), use_cache)

    def try_admit(self, seq: Sequence, upto: int, use_cache: bool) -> None:
        before = self.state()
        hit = self.manager.lookup(seq)
        assert self.state() == before
        self.check_hit(seq, hit)
        done = hit.num_tokens if use_cache else 0
        in_queue = [b for blocks in hit.blocks for b in blocks if b and not self.manager._pool.references(b)]
        columns = -(-upto // self.size) - done // self.size
        needed = columns * len(self.windows) + (len(in_queue) if use_cache else 0)
        fits = needed <= self.manager.num_free_blocks
        updates = self.manager.allocate(seq, upto, hit if use_cache else None, count_query=not seq.admissions)
        assert (updates is not None) == fits
        if updates is None:
            assert self.state() == before
            assert self.running or not self.manager.fits(seq.num_tokens)
            return
        assert [start for _, start, _ in updates] == [0] * len(self.windows)
        assert tuple(blocks for _, _, blocks in updates) == self.manager.block_ids(seq)
        seq.written = seq.committed = seq.hit = done
        seq.admissions += 1
        self.waiting.remove(seq)
        self.running.append(seq)
        self.compute(seq, upto)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), commits=st.booleans())
    def grow(self, data: st.DataObject, commits: bool) -> None:
        """The next chunk of a prompt, or some decode steps; the commit comes now, later, or never."""
        seq = data.draw(st.sampled_from(self.running))
        if seq.written == seq.num_tokens:
            tail = data.draw(st.lists(TOKENS, min_size=1, max_size=5))
            seq.token_ids += tail[: MAX_MODEL_LEN - seq.num_tokens]
        if seq.written < seq.num_tokens:
            self.try_grow(seq, data.draw(st.integers(seq.written + 1, seq.num_tokens)))
        if commits:
            self.manager.commit(seq, seq.written)
            seq.committed = seq.written

    def try_grow(self, seq: Sequence, upto: int) -> None:
        before = self.state()
        tables = self.manager.block_ids(seq)
        needed = self.manager.needs_block(seq, upto)
        columns = -(-upto // self.size) - self.manager.capacity(seq) // self.size
        fits = columns * len(self.windows) <= self.manager.num_free_blocks
        updates = self.manager.allocate(seq, upto)
        assert (updates is not None) == fits
        if updates is None:
            assert self.state() == before
            return
        assert bool(updates) == needed
        for group, start, blocks in updates:
            assert start == len(tables[group])
            tables[group].extend(blocks)
        assert tables == self.manager.block_ids(seq)
        self.compute(seq, upto)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), skip=st.booleans())
    def commit(self, data: st.DataObject, skip: bool) -> None:
        """All that was written, or the older of two steps in flight."""
        seq = data.draw(st.sampled_from(self.running))
        upto = data.draw(st.integers(seq.committed, seq.written))
        if skip and upto < self.manager.next_commit(seq):
            return
        self.manager.commit(seq, upto)
        seq.committed = upto

    @precondition(lambda self: any(seq.committed for seq in self.running))
    @rule(data=st.data(), tail=st.lists(TOKENS, min_size=1, max_size=4))
    def fork(self, data: st.DataObject, tail: list[int]) -> None:
        parent = data.draw(st.sampled_from([seq for seq in self.running if seq.committed]))
        back = data.draw(st.sampled_from([0, 1, 1, 2, 5]))
        at = max(0, parent.committed - back)
        tokens = [*parent.token_ids[:at], *tail][:MAX_MODEL_LEN]
        child = Sequence(self.new_id(), tokens, parent.cache_salt, parent.extra_keys)
        before = self.state()
        copies = self.manager.fork(parent, child, at)
        if copies is None:
            assert self.state() == before
            assert back > 1 or at < parent.hit or self.manager.num_free_blocks < len(self.windows)
            return
        assert len(copies) == (len(self.windows) if at % self.size else 0)
        for source, target in copies:
            for offset in range(self.size):
                self.memory.pop((target, offset), None)
                if (source, offset) in self.memory:
                    self.memory[target, offset] = self.memory[source, offset]
        child.written = child.committed = child.hit = at
        self.running.append(child)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """The end of a sequence, or its abort with a step in flight."""
        seq = data.draw(st.sampled_from(self.running))
        self.running.remove(seq)
        self.manager.free(seq)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.running))
        self.running.remove(seq)
        self.manager.free(seq)
        seq.written = seq.committed = 0
        self.waiting.append(seq)

    def carry_out_copies(self) -> None:
        """What the next step does before anything else."""
        out, back = self.manager.swap_space.take_copies()
        for pairs, source, target in (
            (out, self.memory, self.host),
            ([(host, block) for block, host in back], self.host, self.memory),
        ):
            for read, written in pairs:
                for offset in range(self.size):
                    target.pop((written, offset), None)
                    if (read, offset) in source:
                        target[written, offset] = source[read, offset]

    @precondition(lambda self: any(seq.written for seq in self.running))
    @rule(data=st.data(), at_once=st.booleans())
    def swap_out(self, data: st.DataObject, at_once: bool) -> None:
        """`at_once`: the copies are carried out before another sequence follows; anyway before anything is written."""
        seq = data.draw(st.sampled_from([seq for seq in self.running if seq.written]))
        before, space = self.state(), self.manager.swap_space
        free = space.num_free
        if not self.manager.swap_out(seq, seq.written):
            assert self.state() == before
            assert free == space.num_free < -(-seq.written // self.size) * len(self.windows)
            return
        self.running.remove(seq)
        self.swapped.append(seq)
        if not at_once and any(other.written for other in self.running):
            self.swap_out(data, at_once=True)
        self.carry_out_copies()

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.swapped))
        upto = min(MAX_MODEL_LEN, seq.written + data.draw(st.integers(0, 5)))
        before = self.state()
        if not self.manager.swap_in(seq, upto):
            assert self.state() == before
            assert self.manager.num_free_blocks < -(-upto // self.size) * len(self.windows)
            return
        self.swapped.remove(seq)
        self.running.append(seq)
        self.carry_out_copies()
        seq.committed = seq.written  # a sequence comes back only after all its steps have been done
        seq.token_ids += [1] * (upto - seq.num_tokens)
        self.compute(seq, upto)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def abort_swapped(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.swapped))
        self.swapped.remove(seq)
        self.manager.swap_space.drop(seq.sequence_id)

    @precondition(lambda self: len(self.waiting) > 2)
    @rule(data=st.data())
    def abort_waiting(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(seq)
        self.manager.free(seq)

    @precondition(lambda self: self.count > self.last_reset + 12)
    @rule(free_all=st.booleans())
    def reset(self, free_all: bool) -> None:
        self.last_reset = self.count
        if free_all:
            while self.running:
                self.manager.free(self.running.pop())
            while self.swapped:
                self.manager.swap_space.drop(self.swapped.pop().sequence_id)
        in_use = bool(self.swapped) or self.manager.num_free_blocks < self.manager.num_blocks
        before = self.state()
        assert self.manager.reset_prefix_cache() == (not in_use)
        if in_use:
            assert self.state() == before
        else:
            assert self.manager.stats().num_cached == 0

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        indices = self.manager._pool.indices
        assert self.mirror == {(group, name) for group, index in enumerate(indices) for name in index}
        assert self.caching or not self.mirror

    @invariant()
    def findable_content_is_what_its_hash_says(self) -> None:
        """Every findable block is full, and holds one piece of content with exactly that hash."""
        if not hasattr(self, "manager"):
            return
        for group, index in enumerate(self.manager._pool.indices):
            for block_hash, block in index.items():
                writer, salt, keys, *tokens = self.memory[block, self.size - 1]
                assert writer == group
                chain = self.hasher.chain(salt, keys)
                chain.extend(tokens, len(tokens) // self.size)
                assert chain.hashes[-1] == block_hash
                for offset in range(self.size):
                    content = self.memory[block, offset]
                    assert content[3:] == tuple(tokens[: len(tokens) - self.size + offset + 1])

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for seq in (*self.running, *self.waiting):
                self.manager.free(seq)
            for seq in self.swapped:
                self.manager.swap_space.drop(seq.sequence_id)
            self.manager.check_integrity()
            assert self.manager.swap_space.num_free == self.manager.swap_space.num_blocks
            assert self.manager.num_free_blocks == self.manager.num_blocks
            assert self.manager.reset_prefix_cache()


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(
    max_examples=400 if DEEP else 60,
    stateful_step_count=100 if DEEP else 50,
    deadline=None,
    derandomize=not DEEP,
    database=None,
)
