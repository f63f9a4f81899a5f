"""What the manager knows of one sequence that holds blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from llmkit.kv_cache.block_pool import NULL_BLOCK, BlockPool, IntegrityError
from llmkit.kv_cache.groups import NEVER
from llmkit.kv_cache.hashing import ExtraKey, HashChain


class CacheableSequence(Protocol):
    """What the manager reads of a sequence.

    sequence_id: unique among the sequences that hold blocks. token_ids: prompt and output; only ever appended
    to while it holds blocks. num_tokens: how many of them count. cache_salt, extra_keys: what the cached
    content depends on besides the tokens; constant.
    """

    @property
    def sequence_id(self) -> str: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def extra_keys(self) -> Sequence[ExtraKey]: ...


@dataclass(slots=True)
class SequenceBlocks:
    """Block tables of one sequence, and how far its content is known.

    tables: per group, block id of each column; all groups have the same number of columns. capacity: tokens
    that the tables have room for. num_computed: tokens whose keys and values are in the cache, as of the last
    commit. num_committed: leading blocks that were offered to the index. first_kept: per group, leading
    columns that are null because the window has left them. chain: hashes, None with prefix caching off.
    next_commit: until this many tokens are computed, a commit has nothing to do. republish: the next commit offers all
    committed blocks to the index again, because some came back from the host and are not findable; so for a fork.
    """

    tables: tuple[list[int], ...]
    capacity: int
    num_computed: int
    num_committed: int
    first_kept: list[int]
    chain: HashChain | None
    next_commit: int = field(default=NEVER)
    republish: bool = False

    def tail_first(self) -> list[int]:
        """All blocks, last column first, the groups side by side: the order in which they should be
        reused."""
        if len(self.tables) == 1:
            return self.tables[0][::-1]
        return [block for column in zip(*(reversed(table) for table in self.tables), strict=True) for block in column]

    def check_integrity(self, name: str, block_size: int, pool: BlockPool) -> None:
        """Raises IntegrityError if tables, counts and the pool's index do not agree; `name` goes into the
        message."""
        for group, table in enumerate(self.tables):
            if len(table) * block_size != self.capacity:
                raise IntegrityError(
                    f"{name}: group {group} has {len(table)} columns, capacity is {self.capacity} tokens"
                )
            nulls = [column for column, block in enumerate(table) if block == NULL_BLOCK]
            if nulls != list(range(self.first_kept[group])):
                raise IntegrityError(
                    f"{name}: group {group} has null columns {nulls}, expected the first {self.first_kept[group]}"
                )
            for column, block in enumerate(table):
                self._check_content(name, group, column, pool.content(block), block_size)
        if not self.num_committed * block_size <= self.num_computed <= self.capacity:
            raise IntegrityError(
                f"{name}: {self.num_committed} blocks committed, {self.num_computed} tokens computed, "
                f"capacity {self.capacity} tokens"
            )

    def _check_content(
        self, name: str, group: int, column: int, content: tuple[int, bytes] | None, block_size: int
    ) -> None:
        if content is None:
            return
        if self.chain is None or column >= self.num_committed:
            raise IntegrityError(
                f"{name}: column {column} of group {group} is findable but only {self.num_committed} blocks of "
                f"{block_size} tokens are committed"
            )
        if content != (group, self.chain.hashes[column]):
            raise IntegrityError(f"{name}: column {column} of group {group} is findable under another content's hash")
