"""Paged attention for prompts and long chunks on Hopper, in Gluon, where Triton itself is told what waits for what.

One program on each multiprocessor: a warp that has keys and values copied from their pages to shared memory
(`hopper_items`), and two groups of four warps that compute (`hopper_attend`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from llmkit_attention.hopper_attend import consume
from llmkit_attention.hopper_items import FIELDS, SLOTS, produce


@gluon.jit
def _barriers(COUNT: gl.constexpr):
    """One for each slot of a channel, completed by COUNT arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit(do_not_specialize=["table_stride", "num_rows", "num_blocks", "min_tokens"])
def prompt_kernel(
    query_ptr, cache, output_ptr, counter_ptr, starts_ptr, seq_lens_ptr, table_ptr, query_stride, query_head_stride,
    output_stride, factor, table_stride, num_rows, num_blocks, min_tokens,
    GROUP_SIZE: gl.constexpr, NUM_KV_HEADS: gl.constexpr, HEAD_SIZE: gl.constexpr, PAGE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Grid: (programs that take items). Rows of more than min_tokens tokens are computed.

    cache: descriptor of copies of [PAGE, 64] numbers from the cache as [pages * 2 * NUM_KV_HEADS * PAGE, HEAD_SIZE].
    counter_ptr: int32, 0 ahead of the launch and after it. num_blocks: as query blocks are numbered (`triton_blocks`),
    of BLOCK_M // GROUP_SIZE tokens each. Other arguments as those of `attention_kernel`.
    """
    BLOCK_Q: gl.constexpr = BLOCK_M // GROUP_SIZE
    LAYOUT: gl.constexpr = cache.layout
    FIELD: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = gl.allocate_shared_memory(cache.dtype, [2, BLOCK_M // 2, HEAD_SIZE], LAYOUT)
    # Channels from one warp to two groups of warps.
    keys = gl.allocate_shared_memory(cache.dtype, [SLOTS, BLOCK_N, HEAD_SIZE], LAYOUT), _barriers(1), _barriers(2)
    values = gl.allocate_shared_memory(cache.dtype, [SLOTS, BLOCK_N, HEAD_SIZE], LAYOUT), _barriers(1), _barriers(2)
    items = gl.allocate_shared_memory(gl.int32, [SLOTS * FIELDS, 1], FIELD), _barriers(1), _barriers(2)
    turns = _barriers(1)
    rows = (starts_ptr, seq_lens_ptr, table_ptr, table_stride, num_rows, num_blocks, min_tokens)
    gl.warp_specialize(
        [
            (consume, (query_ptr, output_ptr, query_stride, query_head_stride, output_stride, factor, items, queries,
                       keys, values, turns, GROUP_SIZE, BLOCK_Q, 0)),
            (consume, (query_ptr, output_ptr, query_stride, query_head_stride, output_stride, factor, items, queries,
                       keys, values, turns, GROUP_SIZE, BLOCK_Q, 1)),
            (produce, (cache, rows, counter_ptr, items, keys, values, NUM_KV_HEADS, BLOCK_Q, PAGE)),
        ],
        [4, 1],
        [232, 40],  # registers: enough for two groups of four warps with 232 each
    )  # fmt: skip
