"""The KV cache manager: maps sequences to blocks, finds cached prefixes, shares and copies blocks on a fork.

Called by the scheduler only, from one thread. The order in the life of a sequence:

    hit = lookup(seq)                   nothing changes
    allocate(seq, num_tokens, hit)      before each step whose tokens need more blocks; all or nothing
    commit(seq, num_computed_tokens)    after each step: full blocks become findable, the window moves on
    fork(parent, child, num_tokens)     any time after the commit of these tokens
    free(seq)                           at the end or on preemption
    swap_out(seq, num_computed_tokens)  instead of `free`, on preemption; swap_in(seq, num_tokens) brings it back

Content is findable only after the commit of the step that computed it, so an aborted or preempted sequence
leaves nothing behind that was never filled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from llmkit.kv_cache.block_pool import NULL_BLOCK, BlockPool, IntegrityError
from llmkit.kv_cache.events import EventReporter, KVEvent
from llmkit.kv_cache.groups import NEVER, make_group_managers
from llmkit.kv_cache.hashing import BlockHasher
from llmkit.kv_cache.layout import KVCacheLayout
from llmkit.kv_cache.prefix_cache import FilledListener, PrefixCache, PrefixHit
from llmkit.kv_cache.sequence_blocks import CacheableSequence, SequenceBlocks
from llmkit.kv_cache.stats import KVCacheStats, KVMap
from llmkit.kv_cache.swap_space import BlockPair, SwapSpace

TableUpdate = tuple[int, int, list[int]]
"""(group, first column, block ids): columns that were appended to a table."""


class KVCacheManager:
    """Blocks of all sequences, all KV groups drawing from one pool.

    max_model_len: longest sequence in tokens; no table grows beyond the block that holds its last token.
    on_event: called with stored, removed and cleared events after the call that caused them has done its
    work. on_filled: called during a commit for each block that became findable: group, block,
    hash, column, hash of the block before it.
    namespace: goes into every content hash, see BlockHasher.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        *,
        max_model_len: int,
        on_event: Callable[[KVEvent], None] | None = None,
        on_filled: FilledListener | None = None,
        namespace: bytes = b"",
    ) -> None:
        self.layout = layout
        self.block_size = layout.block_size
        self.prefix_caching = layout.enable_prefix_caching and bool(layout.groups)
        self._groups = make_group_managers(layout.groups, layout.block_size)
        self._windows = tuple(m for m in self._groups if m.next_release(0) != NEVER)
        self._reporter = EventReporter(on_event)
        on_removed = self._reporter.removed if self._reporter.enabled else None
        self._pool = BlockPool(layout.num_blocks, len(self._groups), on_removed)
        hasher = BlockHasher(layout.block_size, namespace)
        self._prefixes = PrefixCache(self._pool, self._groups, hasher, self._reporter, on_filled)
        self._max_capacity = -(-max_model_len // layout.block_size) * layout.block_size
        self._sequences: dict[str, SequenceBlocks] = {}
        self._held: Counter[int] = Counter()
        self.swap_space = SwapSpace(layout.num_host_blocks)
        self._queries = self._query_tokens = self._hit_tokens = 0

    # Prefix cache

    def lookup(self, seq: CacheableSequence) -> PrefixHit:
        """The longest cached prefix that all groups can go on from, at most num_tokens - 1 tokens.

        One token is always left to compute, because its output is what the next token is sampled from. Takes
        no reference; hashes are remembered, so asking again while the sequence waits is cheap.
        """
        return self._prefixes.lookup(seq) if self.prefix_caching else self._prefixes.no_hit()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content and emit `AllBlocksCleared`.

        False, with nothing changed, while any sequence holds blocks, here or on the host: what they hold would
        otherwise become findable again in part, after the caller was told that nothing old is left.
        """
        if self._pool.num_free != self._pool.num_blocks - 1 or len(self.swap_space):
            return False
        self._pool.forget()
        self._reporter.cleared()
        return True

    # Blocks of a sequence

    def capacity(self, seq: CacheableSequence) -> int:
        """Tokens that the blocks of `seq` have room for; 0 if it has none. Changes only by `allocate`,
        `fork`, `free`, so a caller may keep it beside the sequence."""
        state = self._sequences.get(seq.sequence_id)
        return 0 if state is None else state.capacity

    def next_commit(self, seq: CacheableSequence) -> int:
        """Until this many tokens of `seq` are computed, `commit` has nothing to do and may be skipped (except
        before a `fork`). Changes only by `allocate` of a new sequence, `commit` and `fork`."""
        return self._state(seq).next_commit

    def needs_block(self, seq: CacheableSequence, num_tokens: int) -> bool:
        """Whether `allocate(seq, num_tokens)` has anything to do."""
        state = self._sequences.get(seq.sequence_id)
        return state is None or num_tokens > state.capacity

    def allocate(
        self,
        seq: CacheableSequence,
        num_tokens: int,
        hit: PrefixHit | None = None,
        *,
        count_query: bool = True,
        num_loaded: int = 0,
    ) -> list[TableUpdate] | None:
        """Make room for the first `num_tokens` tokens of `seq`.

        Returns the columns that were appended to its tables, those of the hit included, or None, with nothing
        changed, if the free blocks do not suffice. hit: only when the sequence has no blocks yet; from
        `lookup`, with no other allocation in between. count_query: whether the hit enters the statistics (not
        after a preemption). num_loaded: tokens behind the hit, in whole blocks, that will be loaded from elsewhere:
        of these a sliding window gets no blocks that it would have left. Raises ValueError for a hit that is stale
        or comes too late, or for more tokens than max_model_len.
        """
        state = self._sequences.get(seq.sequence_id)
        if state is None:
            return self._admit(seq, num_tokens, hit, count_query, num_loaded)
        if hit is not None:
            raise ValueError(f"sequence {seq.sequence_id} has blocks already and cannot take a prefix hit")
        if num_tokens <= state.capacity:
            return []
        columns = self._columns(seq, num_tokens)
        if (columns - state.capacity // self.block_size) * len(self._groups) > self._pool.num_free:
            return None
        return self._append(state, columns)

    def commit(self, seq: CacheableSequence, num_computed_tokens: int) -> None:
        """The keys and values of the first `num_computed_tokens` tokens are in the cache.

        Call it only after the step that computed them has succeeded. Blocks that it filled become findable
        (only these are hashed), blocks that have left a sliding window are freed and replaced by the null
        block. Raises ValueError if `seq` has no blocks or not enough for so many tokens.
        """
        state = self._state(seq)
        if num_computed_tokens > state.capacity:
            raise ValueError(
                f"sequence {seq.sequence_id}: {num_computed_tokens} tokens cannot be computed, "
                f"its blocks hold {state.capacity}"
            )
        state.num_computed = num_computed_tokens
        if num_computed_tokens < state.next_commit:
            return
        if state.chain is not None:
            self._prefixes.publish(seq, state, state.chain)
        self._leave_window(state)
        self._set_next_commit(state)

    def fork(
        self, parent: CacheableSequence, child: CacheableSequence, num_tokens: int
    ) -> list[tuple[int, int]] | None:
        """Give `child` the first `num_tokens` computed tokens of `parent`.

        Full blocks are shared; the block in which position `num_tokens` lies, if it is begun, is copied: the
        returned (source, destination) pairs, to be carried out in this order before anything is written.
        None, with nothing changed, if no block is free for the copy, or if a sliding window of the parent has
        left blocks that the child needs; the child can then start with `lookup` like any other sequence. The
        salt and keys of both must be the same. Raises ValueError if `parent` has not committed so many tokens
        or `child` has blocks already.
        """
        source = self._state(parent)
        if child.sequence_id in self._sequences:
            raise ValueError(f"sequence {child.sequence_id} has blocks already and cannot be a fork")
        if not 0 <= num_tokens <= source.num_computed:
            raise ValueError(
                f"sequence {parent.sequence_id} cannot be forked at {num_tokens} tokens, "
                f"{source.num_computed} are committed"
            )
        full, rest = divmod(num_tokens, self.block_size)
        copies = len(self._groups) if rest else 0
        gone = any(
            kept > manager.first_needed(num_tokens)
            for manager, kept in zip(self._groups, source.first_kept, strict=True)
        )
        if gone or copies > self._pool.num_free:
            return None
        first_kept = [
            max(kept, manager.first_kept(num_tokens))
            for manager, kept in zip(self._groups, source.first_kept, strict=True)
        ]
        tables = tuple(
            [NULL_BLOCK] * kept + table[kept:full] for kept, table in zip(first_kept, source.tables, strict=True)
        )
        for table in tables:
            self._pool.acquire(table)
        chain = None if source.chain is None else source.chain.fork(full)
        committed = min(full, source.num_committed)
        state = SequenceBlocks(tables, full * self.block_size, num_tokens, committed, first_kept, chain)
        state.republish = source.republish
        self._sequences[child.sequence_id] = state
        self._set_next_commit(state)
        if not rest:
            return []
        updates = self._append(state, full + 1)
        return [(source.tables[group][full], blocks[0]) for group, _, blocks in updates]

    def free(self, seq: CacheableSequence) -> None:
        """Give back the blocks of `seq`, tail first; nothing happens if it has none. What was committed stays
        findable until its blocks are reused."""
        state = self._sequences.pop(seq.sequence_id, None)
        if state is not None:
            self._pool.release(state.tail_first())

    def swap_out(self, seq: CacheableSequence, num_computed_tokens: int) -> bool:
        """Give back the blocks of `seq` and have the next plan copy what they hold to the host, before anything
        writes them again.

        num_computed_tokens: tokens that are in the cache once all steps before that plan are done, committed or not.
        False, with nothing changed, if the host has no room. Raises ValueError if `seq` has no blocks.
        """
        state = self._state(seq)
        if not self.swap_space.store(seq.sequence_id, state, num_computed_tokens, self.block_size):
            return False
        self.free(seq)
        return True

    def swap_in(self, seq: CacheableSequence, num_tokens: int) -> bool:
        """Blocks for the first `num_tokens` tokens of a swapped sequence; the next plan fills them from the host.

        What the index still finds is shared instead of copied. False, with nothing changed, if the free blocks do
        not suffice. Raises ValueError if `seq` was not swapped out.
        """
        saved = self.swap_space.get(seq.sequence_id)
        if saved is None:
            raise ValueError(f"sequence {seq.sequence_id} has not been swapped out")
        columns = max(self._columns(seq, num_tokens), self._columns(seq, saved.num_computed))
        num_full, hashes = 0, list[bytes]()
        if saved.chain is not None:
            # Its last steps may not have been committed. All that they filled counts as offered, and is offered by the
            # next commit: else a fork could not say of the blocks that it shares which of them are findable.
            num_full = min(saved.num_computed, len(seq.token_ids)) // self.block_size
            saved.chain.extend(seq.token_ids, num_full)
            hashes = saved.chain.hashes[:num_full]
        tables = tuple(
            [NULL_BLOCK] * first + [index.get(block_hash, NULL_BLOCK) for block_hash in hashes[first:]]
            for first, index in zip(saved.first_kept, self._pool.indices, strict=True)
        )
        found = [block for table in tables for block in table if block]
        missing = columns * len(tables) - sum(saved.first_kept) - len(found)
        if missing + self._pool.count_free(found) > self._pool.num_free:
            return False
        self._pool.acquire(found)
        new = iter(self._pool.take(missing))
        copies: list[BlockPair] = []
        for table, first, hosts in zip(tables, saved.first_kept, saved.tables, strict=True):
            table += [NULL_BLOCK] * (columns - len(table))
            for column in range(first, columns):
                if not table[column]:
                    table[column] = next(new)
                    if column - first < len(hosts):
                        copies.append((table[column], hosts[column - first]))
        self.swap_space.load(seq.sequence_id, copies)
        state = SequenceBlocks(
            tables, columns * self.block_size, saved.num_computed, num_full, saved.first_kept, saved.chain
        )
        state.republish = bool(copies) and saved.chain is not None
        self._sequences[seq.sequence_id] = state
        self._set_next_commit(state)
        self._reporter.flush()
        return True

    def block_ids(self, seq: CacheableSequence) -> tuple[list[int], ...]:
        """The block table of `seq` in each group, as lists of the caller's own. Raises ValueError if it has
        none."""
        return tuple(list(table) for table in self._state(seq).tables)

    def block_hashes(self, seq: CacheableSequence, num_blocks: int) -> list[bytes]:
        """Content hashes of the first full blocks of `seq`, at most `num_blocks`, as far as its tokens are known."""
        state = self._sequences.get(seq.sequence_id)
        chain = (state.chain if state is not None else None) or self._prefixes.chain(seq)
        count = min(num_blocks, len(seq.token_ids) // self.block_size)
        chain.extend(seq.token_ids, count)
        return chain.hashes[:count]

    # Blocks that are held for transfers

    def hold(self, blocks: Iterable[int]) -> None:
        """Keep what `blocks` hold, whoever frees them, until `release`; may be nested. Null is ignored."""
        held = [block for block in blocks if block != NULL_BLOCK]
        self._pool.acquire(held)
        self._held.update(held)

    def release(self, blocks: Iterable[int]) -> None:
        """Take back a `hold`. Raises IntegrityError for a block that is not held."""
        released = [block for block in blocks if block != NULL_BLOCK]
        self._held.subtract(released)
        self._pool.release(released)

    @property
    def held(self) -> Counter[int]:
        """Block → how many holds are on it."""
        return +self._held

    def references(self, block: int) -> int:
        """How many tables and holds `block` is in."""
        return self._pool.references(block)

    def cached_block(self, group: int, block_hash: bytes) -> int | None:
        """The block in which this content is findable, in use or not; None if there is none or no such group."""
        indices = self._pool.indices
        return indices[group].get(block_hash) if 0 <= group < len(indices) else None

    def is_cached(self, block: int) -> bool:
        """Whether `block` can be found by its content."""
        return self._pool.content(block) is not None

    @property
    def num_sequences(self) -> int:
        """Sequences that hold blocks."""
        return len(self._sequences)

    def fits(self, num_tokens: int, max_step_tokens: int | None = None) -> bool:
        """Whether a sequence of `num_tokens` can be held when no other sequence holds blocks.

        max_step_tokens: most tokens of one sequence that are ever allocated but not committed (tokens of a
        step times concurrent steps); None: possibly all of them. Matters only to groups with a sliding
        window.
        """
        if num_tokens > self._max_capacity:
            return False
        step = num_tokens if max_step_tokens is None else max_step_tokens
        needed = sum(manager.peak_blocks(num_tokens, max(1, step)) for manager in self._groups)
        return needed <= self._pool.num_blocks - 1

    # Numbers

    @property
    def num_blocks(self) -> int:
        """Blocks that sequences can hold; the null block is not among them."""
        return self._pool.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds; cached content does not keep a block from being reused."""
        return self._pool.num_free

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences hold, 0..1."""
        return 1.0 - self._pool.num_free / (self._pool.num_blocks - 1)

    def map(self) -> KVMap:
        """What became of every block. O(blocks)."""
        return KVMap(self.block_size, self._pool.states())

    def stats(self) -> KVCacheStats:
        """A snapshot of the counters."""
        return KVCacheStats(
            num_blocks=self.num_blocks,
            num_free=self.num_free_blocks,
            num_cached=self._pool.num_cached,
            usage=self.usage,
            prefix_queries=self._queries,
            prefix_query_tokens=self._query_tokens,
            prefix_hit_tokens=self._hit_tokens,
            num_evictions=self._pool.num_evictions,
            num_host_blocks=self.swap_space.num_blocks,
            num_free_host_blocks=self.swap_space.num_free,
        )

    def check_integrity(self) -> None:
        """Recount everything; O(blocks). Raises IntegrityError that names the first disagreement."""
        holders = +self._held
        owner: dict[int, int] = {}
        for name, state in self._sequences.items():
            state.check_integrity(f"sequence {name}", self.block_size, self._pool)
            for group, table in enumerate(state.tables):
                held = [block for block in table if block != NULL_BLOCK]
                holders.update(held)
                for block in held:
                    if owner.setdefault(block, group) != group:
                        raise IntegrityError(f"block {block} is held by groups {owner[block]} and {group}")
        self._pool.check_integrity(holders)
        self.swap_space.check_integrity()
        both = [name for name in self._sequences if self.swap_space.get(name) is not None]
        if both:
            raise IntegrityError(f"sequence {both[0]} has blocks and is swapped out as well")

    # Steps of the above

    def _state(self, seq: CacheableSequence) -> SequenceBlocks:
        try:
            return self._sequences[seq.sequence_id]
        except KeyError:
            raise ValueError(f"sequence {seq.sequence_id} has no blocks") from None

    def _columns(self, seq: CacheableSequence, num_tokens: int) -> int:
        if num_tokens > self._max_capacity:
            raise ValueError(
                f"sequence {seq.sequence_id}: {num_tokens} tokens are more than the {self._max_capacity} "
                "that the block table of max_model_len has room for"
            )
        return -(-num_tokens // self.block_size)

    def _admit(
        self, seq: CacheableSequence, num_tokens: int, hit: PrefixHit | None, count_query: bool, num_loaded: int
    ) -> list[TableUpdate] | None:
        """First allocation of a sequence: the hit's blocks, then new ones, null ones where nothing will be loaded."""
        found = hit.num_tokens // self.block_size if hit is not None else 0
        columns = self._columns(seq, num_tokens) - found
        if columns < 0:
            raise ValueError(f"sequence {seq.sequence_id}: room for {num_tokens} tokens is less than its prefix hit")
        chain = self._prefixes.chain(seq) if self.prefix_caching else None
        if found:
            if chain is None or hit is None:
                raise ValueError(f"sequence {seq.sequence_id}: a prefix hit although prefix caching is off")
            self._prefixes.verify(seq, hit, chain)
        tables = tuple(list(table) for table in (hit or self._prefixes.no_hit()).blocks)
        skipped = self._skip_unseen(tables, found * self.block_size + num_loaded) if num_loaded else 0
        from_queue = sum(map(self._pool.count_free, tables))
        if columns * len(self._groups) - skipped + from_queue > self._pool.num_free:
            return None
        for table in tables:
            self._pool.acquire(table)
        first_kept = [table.count(NULL_BLOCK) for table in tables]
        covered = found * self.block_size
        state = SequenceBlocks(tables, covered, covered, found, first_kept, chain)
        self._sequences[seq.sequence_id] = state
        self._prefixes.drop_chain(seq)
        self._set_next_commit(state)
        if hit is not None and count_query and self.prefix_caching:
            self._queries += 1
            self._query_tokens += seq.num_tokens
            self._hit_tokens += covered
        self._append(state, found + columns)
        return [(group, 0, list(table)) for group, table in enumerate(tables) if table]

    def _skip_unseen(self, tables: tuple[list[int], ...], num_computed_tokens: int) -> int:
        """Put the null block where a window will have left once so many tokens are there; how many columns behind
        the tables' ends that are."""
        skipped = 0
        for manager in self._windows:
            table = tables[manager.group]
            first, end = manager.first_needed(num_computed_tokens), len(table)
            table[: min(first, end)] = [NULL_BLOCK] * min(first, end)
            table += [NULL_BLOCK] * (first - end)
            skipped += max(0, first - end)
        return skipped

    def _append(self, state: SequenceBlocks, columns: int) -> list[TableUpdate]:
        """New blocks up to `columns` columns in every group; the caller has checked that they are free."""
        missing = [columns - len(table) for table in state.tables]
        blocks = self._pool.take(sum(missing))
        state.capacity = columns * self.block_size
        updates = []
        taken = 0
        for group, (table, count) in enumerate(zip(state.tables, missing, strict=True)):
            new = blocks[taken : taken + count]
            taken += count
            updates.append((group, len(table), new))
            table.extend(new)
        self._reporter.flush()
        return updates

    def _leave_window(self, state: SequenceBlocks) -> None:
        for manager in self._windows:
            before = state.first_kept[manager.group]
            kept = manager.first_kept(state.num_computed)
            if kept > before:
                table = state.tables[manager.group]
                self._pool.release(table[before:kept][::-1])
                table[before:kept] = [NULL_BLOCK] * (kept - before)
                state.first_kept[manager.group] = kept

    def _set_next_commit(self, state: SequenceBlocks) -> None:
        if state.republish:
            state.next_commit = 0
            return
        following = (state.num_committed + 1) * self.block_size if state.chain is not None else NEVER
        for manager in self._windows:
            following = min(following, manager.next_release(state.first_kept[manager.group]))
        state.next_commit = following
