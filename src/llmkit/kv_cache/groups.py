"""What a KV group keeps: full attention keeps every block, a sliding window lets go of what it has left
behind.

A group manager holds no state of sequences; it answers where a prefix hit can end, which columns of a table
must hold a block, and when the next one can go. Columns are blocks of `block_size` tokens.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Sequence

from llmkit.kv_cache.block_pool import NULL_BLOCK
from llmkit.kv_cache.layout import KVCacheLayout, KVGroup

NEVER = sys.maxsize
"""A number of tokens that no sequence reaches."""


class GroupManager(ABC):
    """The rules of one KV group."""

    def __init__(self, group: int, block_size: int) -> None:
        self.group = group
        self.block_size = block_size

    @abstractmethod
    def first_needed(self, num_computed_tokens: int) -> int:
        """First column that any token from position `num_computed_tokens` on still attends to."""

    @abstractmethod
    def longest_hit(self, hashes: Sequence[bytes], index: Container[bytes], limit: int) -> int:
        """Largest number of leading blocks, at most `limit`, after which computing can go on from the
        cache."""

    @abstractmethod
    def first_kept(self, num_computed_tokens: int) -> int:
        """First column to keep once so many tokens are computed.

        One token less is assumed, so that right after a commit a fork may still recompute the last token.
        """

    @abstractmethod
    def next_release(self, first_kept: int) -> int:
        """Number of computed tokens at which `first_kept` columns become more."""

    @abstractmethod
    def peak_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """Most blocks that a sequence of `num_tokens` holds at any time when at most `max_step_tokens` of its
        tokens are allocated but not yet computed."""

    def hit_blocks(self, hashes: Sequence[bytes], index: Mapping[bytes, int], num_blocks: int) -> list[int]:
        """Table of a hit of `num_blocks` blocks; null where no block is needed."""
        first = self.first_needed(num_blocks * self.block_size)
        return [NULL_BLOCK] * first + [index[block_hash] for block_hash in hashes[first:num_blocks]]


class FullAttentionManager(GroupManager):
    """Every token attends to all before it."""

    def first_needed(self, num_computed_tokens: int) -> int:  # noqa: ARG002
        return 0

    def longest_hit(self, hashes: Sequence[bytes], index: Container[bytes], limit: int) -> int:
        for i in range(limit):
            if hashes[i] not in index:
                return i
        return limit

    def first_kept(self, num_computed_tokens: int) -> int:  # noqa: ARG002
        return 0

    def next_release(self, first_kept: int) -> int:  # noqa: ARG002
        return NEVER

    def peak_blocks(self, num_tokens: int, max_step_tokens: int) -> int:  # noqa: ARG002
        return -(-num_tokens // self.block_size)


class SlidingWindowManager(GroupManager):
    """A token at position p attends to positions p - window + 1 .. p."""

    def __init__(self, group: int, block_size: int, window: int) -> None:
        super().__init__(group, block_size)
        if window < 1:
            raise ValueError(f"the sliding window of KV group {group} must be at least 1 token, got {window}")
        self.window = window

    def first_needed(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.window + 1) // self.block_size

    def longest_hit(self, hashes: Sequence[bytes], index: Container[bytes], limit: int) -> int:
        end = limit
        needed = self.first_needed(end * self.block_size)
        column = end - 1
        while column >= needed:
            if hashes[column] not in index:
                end = column
                needed = self.first_needed(end * self.block_size)
            column -= 1
        return end

    def first_kept(self, num_computed_tokens: int) -> int:
        return self.first_needed(num_computed_tokens - 1)

    def next_release(self, first_kept: int) -> int:
        return (first_kept + 1) * self.block_size + self.window

    def peak_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        # At worst the window and the tokens of a step lie across one block border more than they must.
        across = (self.window + max_step_tokens - 2) // self.block_size + 2
        return min(-(-num_tokens // self.block_size), across)


def agreed_length(
    managers: Sequence[GroupManager], indices: Sequence[Container[bytes]], hashes: Sequence[bytes], limit: int
) -> int:
    """Largest number of leading blocks, at most `limit`, after which every group can go on, given which contents
    there are for it.

    What is a hit for one group may be too long for another, and a sliding window's shorter hit needs other blocks
    than its longer one, so the groups are asked in turn until all accept the same length.
    """
    agreed, length = 0, limit
    while length:
        for manager, index in zip(managers, indices, strict=True):
            shorter = manager.longest_hit(hashes, index, length)
            agreed = agreed + 1 if shorter == length else 1
            length = shorter
            if agreed == len(managers):
                return length
    return 0


class _AfterCached:
    """The contents of a cached prefix, and whatever else there is."""

    def __init__(self, cached: Sequence[bytes], more: Container[bytes]) -> None:
        self._cached = frozenset(cached)
        self._more = more

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._cached or block_hash in self._more


def loadable_blocks(
    layout: KVCacheLayout, hashes: Sequence[bytes], num_cached: int, available: Sequence[Container[bytes]]
) -> int:
    """How many blocks behind the first `num_cached` ones, which are in the cache, a connector can load, so that
    every KV group can go on behind them.

    hashes: of the sequence's full blocks. available: per group, the contents that the connector has. Of a group with
    a sliding window only the blocks that are still seen need to be there.
    """
    managers = make_group_managers(layout.groups, layout.block_size)
    indices = [_AfterCached(hashes[:num_cached], more) for more in available]
    return max(0, agreed_length(managers, indices, hashes, len(hashes)) - num_cached)


def make_group_managers(groups: Sequence[KVGroup], block_size: int) -> tuple[GroupManager, ...]:
    """The manager of each group of a layout, in order."""
    return tuple(
        FullAttentionManager(i, block_size)
        if group.spec.sliding_window is None
        else SlidingWindowManager(i, block_size, group.spec.sliding_window)
        for i, group in enumerate(groups)
    )
