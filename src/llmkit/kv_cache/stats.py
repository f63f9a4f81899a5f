"""Numbers about the KV cache for logs and metrics."""

from __future__ import annotations

from dataclasses import dataclass

FREE, CACHED, IN_USE, SHARED = range(4)


@dataclass(frozen=True, slots=True)
class KVMap:
    """What became of every usable block, in the order of their numbers.

    states: one byte a block: 0 free, 1 free but findable by its content, 2 held by one sequence, 3 by several.
    """

    block_size: int
    states: bytes

    def counts(self) -> dict[str, int]:
        """How many blocks are in each state."""
        names = ("free", "cached", "in_use", "shared")
        return {name: self.states.count(state) for state, name in enumerate(names)}


@dataclass(frozen=True, slots=True)
class KVCacheStats:
    """A snapshot; the counters run from the start of the manager.

    num_blocks: usable blocks. num_free: of these, not held by a sequence. num_cached: findable blocks, held
    or not. usage: share of the usable blocks that is held, 0..1. prefix_queries: sequences whose prefix was
    looked up at their first admission; prefix_query_tokens, prefix_hit_tokens: their tokens, and those found.
    num_evictions: cached blocks that were reused. num_host_blocks, num_free_host_blocks: of the swap space.
    """

    num_blocks: int
    num_free: int
    num_cached: int
    usage: float
    prefix_queries: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    num_evictions: int
    num_host_blocks: int = 0
    num_free_host_blocks: int = 0
