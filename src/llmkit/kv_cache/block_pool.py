"""The pool of KV blocks: reference counts, the queue of free blocks and the content-hash index.

Every operation is O(1) per block. A free block stays findable until it is handed out again: the queue is in
the order of reuse, blocks without content first, then cached blocks, least recently used first. The queue is
an intrusive doubly linked list over two arrays, with the null block 0 as its sentinel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from llmkit.errors import EngineError
from llmkit.kv_cache.stats import CACHED, FREE, IN_USE, SHARED

NULL_BLOCK = 0
"""Id of the block that is never handed out; stands in tables for positions that a sliding window has left."""


class IntegrityError(EngineError):
    """The books of the KV cache do not agree: a defect in llmkit, never a user's mistake."""


class BlockPool:
    """Owns every block of the cache.

    num_blocks: blocks 0..num_blocks-1, of which 0 is the null block. num_groups: KV groups; a block holds the
    content of one group at a time and the index is kept per group. on_removed(group, hash): called whenever
    content stops being findable because its block is reused.

    References are counted by `take`, `acquire` and `release`; content becomes findable only through
    `register`.
    """

    def __init__(
        self, num_blocks: int, num_groups: int = 1, on_removed: Callable[[int, bytes], None] | None = None
    ) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is reserved), got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.num_evictions = 0
        self.indices: tuple[dict[bytes, int], ...] = tuple({} for _ in range(num_groups))
        """Per group: content hash → block. Read by lookups; changed by the pool only."""
        self._on_removed = on_removed
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._groups = [0] * num_blocks
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by their content, in use or not."""
        return sum(map(len, self.indices))

    def references(self, block: int) -> int:
        """How many tables hold `block`."""
        return self._references[block]

    def content(self, block: int) -> tuple[int, bytes] | None:
        """(group, hash) under which `block` can be found, None if it cannot."""
        block_hash = self._hashes[block]
        return None if block_hash is None else (self._groups[block], block_hash)

    def first_without(self, group: int, blocks: Sequence[int], hashes: Sequence[bytes]) -> int | None:
        """The first of `blocks` that does not hold the content with its hash, null ones aside; None if all do. Both
        [n]."""
        known, groups = self._hashes, self._groups
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block != NULL_BLOCK and (known[block] != block_hash or groups[block] != group):
                return block
        return None

    def states(self) -> bytes:
        """The states of all usable blocks, see `KVMap`. O(num_blocks)."""
        pairs = zip(self._references[1:], self._hashes[1:], strict=True)
        return bytes(
            (FREE if block_hash is None else CACHED) if not count else IN_USE if count == 1 else SHARED
            for count, block_hash in pairs
        )

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are in the free queue now, that is how many `acquire` would take out of it."""
        references = self._references
        return sum(1 for block in blocks if block and not references[block])

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks with one reference each; what they held is forgotten.

        Raises ValueError, with nothing changed, if fewer are free.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks were asked for but only {self.num_free} are free")
        following, references, hashes = self._next, self._references, self._hashes
        taken = []
        block = following[NULL_BLOCK]
        for _ in range(count):
            if hashes[block] is not None:
                self._evict(block)
            references[block] = 1
            taken.append(block)
            block = following[block]
        following[NULL_BLOCK] = block
        self._previous[block] = NULL_BLOCK
        self.num_free -= count
        return taken

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more reference to each of `blocks`; free ones leave the queue with their content. Null is
        ignored."""
        references = self._references
        for block in blocks:
            if not block:
                continue
            if not references[block]:
                self._unlink(block)
                self.num_free -= 1
            references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each of `blocks`, in the given order. Null is ignored.

        Blocks that nobody holds any more enter the queue: cached ones at its end in this order, so the first
        is evicted first; the others at its front. Raises IntegrityError if a block is not held.
        """
        references, hashes = self._references, self._hashes
        for block in blocks:
            if not block:
                continue
            left = references[block] - 1
            if left < 0:
                raise IntegrityError(f"block {block} was released but nobody holds it")
            references[block] = left
            if not left:
                after = self._previous[NULL_BLOCK] if hashes[block] is not None else NULL_BLOCK
                self._link(block, after)
                self.num_free += 1

    def register(self, block: int, group: int, block_hash: bytes) -> bool:
        """Make a held, filled block findable; True if its content was not findable before.

        If another block already has the content, the index keeps that one while it is in use; if it is free,
        the index moves to `block` (which will live longer) and the other becomes an empty block. Raises
        IntegrityError if the block is free or has other content.
        """
        known = self._hashes[block]
        if not self._references[block] or (known is not None and (known != block_hash or self._groups[block] != group)):
            raise IntegrityError(f"block {block} was registered but it is free or holds other content")
        if known is not None:
            return False
        index = self.indices[group]
        other = index.get(block_hash)
        if other is not None:
            if self._references[other]:
                return False
            self._hashes[other] = None
            self._unlink(other)
            self._link(other, NULL_BLOCK)
        index[block_hash] = block
        self._hashes[block] = block_hash
        self._groups[block] = group
        return other is None

    def forget(self) -> None:
        """Empty the index: no block is findable any more. O(number of cached blocks); `on_removed` is not called.

        Free blocks that had content are reused first: the system has given them memory, which blocks that were never
        written are yet to get, at the price of a page fault.
        """
        block = self._previous[NULL_BLOCK]
        while self._hashes[block] is not None:
            before = self._previous[block]
            self._unlink(block)
            self._link(block, NULL_BLOCK)
            self._hashes[block] = None
            block = before
        for index in self.indices:
            for block in index.values():
                self._hashes[block] = None
            index.clear()

    def _evict(self, block: int) -> None:
        block_hash, group = self._hashes[block], self._groups[block]
        assert block_hash is not None
        del self.indices[group][block_hash]
        self._hashes[block] = None
        self.num_evictions += 1
        if self._on_removed is not None:
            self._on_removed(group, block_hash)

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before

    def _link(self, block: int, after: int) -> None:
        """Insert `block` behind `after`."""
        following = self._next[after]
        self._next[after] = block
        self._previous[block] = after
        self._next[block] = following
        self._previous[following] = block

    def free_queue(self) -> list[int]:
        """Free blocks in the order in which they will be reused. Raises IntegrityError if the links are
        broken."""
        queue: list[int] = []
        before, block = NULL_BLOCK, self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            if self._previous[block] != before:
                raise IntegrityError(
                    f"free queue: block {block} follows {before} but points to {self._previous[block]}"
                )
            if len(queue) == self.num_blocks:
                raise IntegrityError("free queue: the links run in a circle")
            queue.append(block)
            before, block = block, self._next[block]
        if self._previous[NULL_BLOCK] != before:
            raise IntegrityError(f"free queue: ends at {before} but its end is noted as {self._previous[NULL_BLOCK]}")
        return queue

    def check_integrity(self, holders: Mapping[int, int]) -> None:
        """Compare counts, queue and index with each other and with `holders` (block → tables that hold it).

        O(num_blocks). Raises IntegrityError that names the first disagreement.
        """
        for block, count in enumerate(self._references):
            if count != holders.get(block, 0):
                raise IntegrityError(
                    f"block {block} counts {count} references but {holders.get(block, 0)} tables hold it"
                )
        if NULL_BLOCK in holders or self._hashes[NULL_BLOCK] is not None:
            raise IntegrityError("the null block is held or cached")
        self._check_queue()
        for group, index in enumerate(self.indices):
            for block_hash, block in index.items():
                if self.content(block) != (group, block_hash):
                    raise IntegrityError(
                        f"index of group {group} leads to block {block}, which holds {self.content(block)}"
                    )
        hashed = sum(block_hash is not None for block_hash in self._hashes)
        if hashed != self.num_cached:
            raise IntegrityError(f"{hashed} blocks have content but the index knows {self.num_cached}")

    def _check_queue(self) -> None:
        queue = self.free_queue()
        if len(queue) != self.num_free:
            raise IntegrityError(f"the free queue has {len(queue)} blocks but {self.num_free} are counted")
        unheld = {block for block in range(1, self.num_blocks) if not self._references[block]}
        if set(queue) != unheld:
            raise IntegrityError(f"free queue and unheld blocks differ in {sorted(unheld.symmetric_difference(queue))}")
        cached = [self._hashes[block] is not None for block in queue]
        if sorted(cached) != cached:
            raise IntegrityError("the free queue would reuse a cached block before an empty one")
