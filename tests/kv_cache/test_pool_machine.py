"""The block pool against a plain model, checked after every step. LLMKIT_DEEP_TESTS=1 runs it for long."""

from __future__ import annotations

import os
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llmkit.kv_cache.block_pool import BlockPool

DEEP = os.environ.get("LLMKIT_DEEP_TESTS") == "1"


class PoolMachine(RuleBasedStateMachine):
    """The model: how often each block is held, what is findable where, and in which order blocks will be reused."""

    @initialize(num_blocks=st.integers(2, 12), num_groups=st.integers(1, 3))
    def start(self, num_blocks: int, num_groups: int) -> None:
        self.evicted: list[tuple[int, bytes]] = []
        self.pool = BlockPool(num_blocks, num_groups, lambda group, name: self.evicted.append((group, name)))
        self.num_groups = num_groups
        self.held: Counter[int] = Counter()
        self.contents: dict[int, tuple[int, bytes]] = {}
        self.empty = list(range(1, num_blocks))  # next to be reused first
        self.cached: list[int] = []

    def drop(self, block: int) -> None:
        self.held[block] -= 1
        if not self.held[block]:
            del self.held[block]
            if block in self.contents:
                self.cached.append(block)
            else:
                self.empty.insert(0, block)

    @rule(count=st.integers(0, 6))
    def take(self, count: int) -> None:
        queue = self.empty + self.cached
        if count > len(queue):
            assert self.pool.num_free < count
            return
        expected = queue[:count]
        assert self.pool.take(count) == expected
        forgotten = [self.contents.pop(block) for block in expected if block in self.contents]
        assert self.evicted == forgotten
        self.evicted.clear()
        self.empty = [block for block in self.empty if block not in expected]
        self.cached = [block for block in self.cached if block not in expected]
        self.held.update(expected)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True, max_size=4))
        self.pool.release(blocks)
        for block in blocks:
            self.drop(block)

    @precondition(lambda self: self.held or self.cached)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        """What a hit does: held blocks and free ones with content."""
        block = data.draw(st.sampled_from(sorted({*self.held, *self.cached})))
        self.pool.acquire([block, 0])
        if block in self.cached:
            self.cached.remove(block)
        self.held[block] += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data(), name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def register(self, data: st.DataObject, name: bytes) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        group = data.draw(st.integers(0, self.num_groups - 1))
        if block in self.contents:
            group, name = self.contents[block]
        twin = next((other for other, content in self.contents.items() if content == (group, name)), None)
        assert self.pool.register(block, group, name) == (twin is None)
        if twin is None:
            self.contents[block] = (group, name)
        elif twin not in self.held:
            self.contents[block] = self.contents.pop(twin)
            self.cached.remove(twin)
            self.empty.insert(0, twin)

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        self.contents.clear()
        self.empty = self.cached + self.empty
        self.cached = []

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity(self.held)
        assert self.pool.free_queue() == self.empty + self.cached
        assert self.pool.num_cached == len(self.contents)
        for block, (group, name) in self.contents.items():
            assert self.pool.indices[group][name] == block


TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    max_examples=300 if DEEP else 60,
    stateful_step_count=60 if DEEP else 30,
    deadline=None,
    derandomize=not DEEP,
    database=None,
)
