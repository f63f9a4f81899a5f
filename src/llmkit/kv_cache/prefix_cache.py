"""The prefix cache: finds the cached prefix of a sequence and makes newly filled blocks findable."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from llmkit.kv_cache.block_pool import BlockPool
from llmkit.kv_cache.events import EventReporter
from llmkit.kv_cache.groups import GroupManager, agreed_length
from llmkit.kv_cache.hashing import BlockHasher, HashChain
from llmkit.kv_cache.sequence_blocks import CacheableSequence, SequenceBlocks

FilledListener = Callable[[int, int, bytes, int, bytes | None], None]
"""Told of a block that became findable: group, block id, hash, column."""

_REMEMBERED_CHAINS = 64  # bounds what sequences that ended while they waited leave behind


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A cached prefix: `num_tokens` tokens, a multiple of the block size, and per group the blocks that hold
    them (null where a sliding window does not need one). Valid until the next call that takes blocks."""

    num_tokens: int
    blocks: tuple[list[int], ...]


@dataclass(slots=True)
class _KnownChain:
    """Hashes of a sequence that waits, and what they were computed from."""

    keys: tuple[object, ...]
    token_ids: list[int]
    chain: HashChain


class PrefixCache:
    """Content hashes of sequences on one side, the pool's index on the other."""

    def __init__(
        self,
        pool: BlockPool,
        groups: tuple[GroupManager, ...],
        hasher: BlockHasher,
        reporter: EventReporter,
        on_filled: FilledListener | None = None,
    ) -> None:
        self._pool = pool
        self._groups = groups
        self._hasher = hasher
        self._reporter = reporter
        self._on_filled = on_filled
        self._known_chains: OrderedDict[str, _KnownChain] = OrderedDict()

    def lookup(self, seq: CacheableSequence) -> PrefixHit:
        """The longest cached prefix that every group can go on from, at most num_tokens - 1 tokens."""
        limit = (min(seq.num_tokens, len(seq.token_ids)) - 1) // self._hasher.block_size
        if limit < 1:
            return self.no_hit()
        chain = self.chain(seq)
        chain.extend(seq.token_ids, limit)
        length = agreed_length(self._groups, self._pool.indices, chain.hashes, limit)
        blocks = tuple(
            manager.hit_blocks(chain.hashes, index, length)
            for manager, index in zip(self._groups, self._pool.indices, strict=True)
        )
        return PrefixHit(length * self._hasher.block_size, blocks)

    def no_hit(self) -> PrefixHit:
        """The hit of nothing."""
        return PrefixHit(0, tuple([] for _ in self._groups))

    def chain(self, seq: CacheableSequence) -> HashChain:
        """The hash chain of a sequence that holds no blocks yet.

        Remembered for the sequences asked about last, as long as the token list is the same object, so that a
        sequence that waits for blocks is not hashed again in every step.
        """
        keys = (seq.cache_salt, tuple(seq.extra_keys))
        known = self._known_chains.get(seq.sequence_id)
        if known is not None and known.token_ids is seq.token_ids and known.keys == keys:
            self._known_chains.move_to_end(seq.sequence_id)
            return known.chain
        chain = self._hasher.chain(seq.cache_salt, seq.extra_keys)
        self._known_chains[seq.sequence_id] = _KnownChain(keys, seq.token_ids, chain)
        if len(self._known_chains) > _REMEMBERED_CHAINS:
            self._known_chains.popitem(last=False)
        return chain

    def drop_chain(self, seq: CacheableSequence) -> None:
        """Do not remember the chain of `seq` any more: it has been admitted and carries its own."""
        self._known_chains.pop(seq.sequence_id, None)

    def verify(self, seq: CacheableSequence, hit: PrefixHit, chain: HashChain) -> None:
        """Raises ValueError if a block of `hit` no longer holds the tokens of `seq`."""
        length = hit.num_tokens // self._hasher.block_size
        chain.extend(seq.token_ids, length)
        for group, blocks in enumerate(hit.blocks):
            block = self._pool.first_without(group, blocks, chain.hashes[:length])
            if block is not None:
                raise ValueError(f"sequence {seq.sequence_id}: stale prefix hit, block {block} was reused")

    def publish(self, seq: CacheableSequence, state: SequenceBlocks, chain: HashChain) -> None:
        """Make the blocks that were filled since the last time findable."""
        first, full = state.num_committed, state.num_computed // self._hasher.block_size
        if state.republish:
            first, state.republish = 0, False
        if full <= first:
            return
        chain.extend(seq.token_ids, full)
        state.num_committed = full
        register, hashes = self._pool.register, chain.hashes
        for group, table in enumerate(state.tables):
            kept = max(first, state.first_kept[group])  # columns before that were never loaded
            stored = [column for column in range(kept, full) if register(table[column], group, hashes[column])]
            if stored and self._reporter.enabled:
                self._reporter.stored(group, stored, chain, seq.token_ids, seq.extra_keys)
            if self._on_filled is not None:
                for column in stored:
                    parent = hashes[column - 1] if column else None
                    self._on_filled(group, table[column], hashes[column], column, parent)
