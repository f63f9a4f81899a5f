"""Of the attention kernel for Hopper: the two groups of four warps that compute, each half of the queries of an item.

Source: Shah et al., "FlashAttention-3" (2024): the groups take turns to issue products, so that one has its softmax
while the other multiplies; and a group multiplies the values of a tile while it has the softmax of the next.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from llmkit_attention.hopper_items import CHUNK, SLOTS, phase_of, receive_item


@gluon.jit
def _load_queries(queries, query_ptr, cell, exists):
    """Queries at these offsets to shared memory; zero where there is none."""
    queries.store(gl.load(query_ptr + cell, mask=exists, other=0.0))
    fence_async_shared()


@gluon.jit
def _clear(tile, count):
    """Zero for all but the first `count` values of a tile: beyond a row's end there may be anything, NaN included."""
    BLOCK_N: gl.constexpr = tile.shape[0]
    CHUNKS: gl.constexpr = tile.shape[1] // CHUNK
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    chunks = tile._reinterpret(tile.dtype, [CHUNKS, BLOCK_N, CHUNK], tile.layout)
    there = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout)) < count
    for c in gl.static_range(CHUNKS):
        numbers = chunks.index(c).load(layout)
        chunks.index(c).store(gl.where(there[:, None], numbers, gl.zeros_like(numbers)))
    fence_async_shared()


@gluon.jit
def _start_scores(query, keys, turns, use, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    """Products of the queries and a tile of keys, under way, once it is this group's turn."""
    tile = keys[0].index(use % SLOTS)
    BLOCK_M: gl.constexpr = query.shape[0]
    BLOCK_N: gl.constexpr = tile.shape[0]
    mbarrier.wait(turns.index(HALF), (use + 1 - HALF) & 1)
    zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LAYOUT)
    return warpgroup_mma(query, tile.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _weights(scores, total, peak, position, start, factor, MASKED: gl.constexpr):
    """(weights, what the sums so far fade by, their new total, the new peak), base 2; with MASKED, of the keys from
    `start` those up to each query's position count."""
    if MASKED:
        BLOCK_N: gl.constexpr = scores.shape[1]
        key = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(key[None, :] <= position[:, None], scores, -float("inf"))
    new_peak = gl.maximum(peak, gl.max(scores, 1) * factor)
    shift = new_peak
    if MASKED:  # a query may have seen nothing yet
        shift = gl.where(new_peak == -float("inf"), 0.0, new_peak)
    weights = gl.exp2(scores * factor - shift[:, None])
    fade = gl.exp2(peak - shift)
    return weights, fade, total * fade + gl.sum(weights, 1), new_peak


@gluon.jit
def _step(
    query, keys, values, turns, use, start, sums, weights, position, factor,
    HALF: gl.constexpr, MASKED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Fold the keys from `start`, use `use` of the channels, beside the values of the tile before: (sums, weights)."""
    acc, total, peak = sums
    last = use - 1
    scores = _start_scores(query, keys, turns, use, HALF, LAYOUT)
    mbarrier.wait(values[1].index(last % SLOTS), phase_of(last))
    acc = warpgroup_mma(weights, values[0].index(last % SLOTS), acc, is_async=True)
    mbarrier.arrive(turns.index(1 - HALF), count=1)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(keys[2].index(use % SLOTS), count=1)
    new_weights, fade, total, peak = _weights(scores, total, peak, position, start, factor, MASKED)
    # Waiting for the next keys here keeps ptxas from moving the softmax behind the wait for the product.
    mbarrier.wait(keys[1].index((use + 1) % SLOTS), phase_of(use + 1), pred=start > 0)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(values[2].index(last % SLOTS), count=1)
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, acc.type.layout))[:, None]
    return (acc, total, peak), gl.convert_layout(new_weights.to(query.dtype), weights.type.layout)


@gluon.jit
def _attend(
    query, keys, values, turns, use, position, context, first, length, factor,
    BLOCK_Q: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """(result float32 [m, head_size] of a query block's half, the next use of the channels)."""
    BLOCK_M: gl.constexpr = query.shape[0]
    BLOCK_N: gl.constexpr = keys[0].shape[1]
    HEAD_SIZE: gl.constexpr = query.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_SIZE, 16])
    end = context + gl.minimum(first + BLOCK_Q, length)
    open_to = gl.minimum(context + first + 1, end) // BLOCK_N * BLOCK_N  # all queries see the keys before it
    start = (end - 1) // BLOCK_N * BLOCK_N
    acc = gl.zeros([BLOCK_M, HEAD_SIZE], gl.float32, OUTPUT)
    total = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, LAYOUT))
    peak = gl.full([BLOCK_M], -float("inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    mbarrier.wait(keys[1].index(use % SLOTS), phase_of(use))
    scores = _start_scores(query, keys, turns, use, HALF, LAYOUT)
    mbarrier.arrive(turns.index(1 - HALF), count=1)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(keys[2].index(use % SLOTS), count=1)
    weights, _, total, peak = _weights(scores, total, peak, position, start, factor, True)
    weights = gl.convert_layout(weights.to(query.dtype), gl.DotOperandLayout(0, OUTPUT, 2))
    mbarrier.wait(keys[1].index((use + 1) % SLOTS), phase_of(use + 1), pred=start > 0)
    if start + BLOCK_N > context + length:
        mbarrier.wait(values[1].index(use % SLOTS), phase_of(use))
        _clear(values[0].index(use % SLOTS), context + length - start)
    sums = (acc, total, peak)
    use += 1
    start -= BLOCK_N
    while start >= open_to:
        sums, weights = _step(
            query, keys, values, turns, use, start, sums, weights, position, factor, HALF, True, LAYOUT
        )
        use += 1
        start -= BLOCK_N
    while start >= 0:
        sums, weights = _step(
            query, keys, values, turns, use, start, sums, weights, position, factor, HALF, False, LAYOUT
        )
        use += 1
        start -= BLOCK_N
    acc, total, peak = sums
    last = use - 1
    mbarrier.wait(values[1].index(last % SLOTS), phase_of(last))
    acc = warpgroup_mma(weights, values[0].index(last % SLOTS), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(values[2].index(last % SLOTS), count=1)
    return acc / gl.convert_layout(total, gl.SliceLayout(1, OUTPUT))[:, None], use


@gluon.jit
def consume(
    query_ptr, output_ptr, query_stride, query_head_stride, output_stride, factor, items, queries, keys, values, turns,
    GROUP_SIZE: gl.constexpr, BLOCK_Q: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Attention of one half of the queries of every item that comes."""
    query = queries.index(HALF)
    BLOCK_M: gl.constexpr = query.shape[0]
    HEAD_SIZE: gl.constexpr = query.shape[1]
    BLOCK_N: gl.constexpr = keys[0].shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    m = HALF * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    m_of_scores = HALF * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, scores))
    column = gl.arange(0, HEAD_SIZE, layout=gl.SliceLayout(0, layout))[None, :]
    number = 0
    use = 0
    kv_head, start, length, first, context = receive_item(items, number)
    while kv_head >= 0:
        token = first + m // GROUP_SIZE
        exists = ((m // GROUP_SIZE < BLOCK_Q) & (token < length))[:, None]
        head = kv_head * GROUP_SIZE + m % GROUP_SIZE
        token = (start + token).to(gl.int64)
        _load_queries(query, query_ptr, (token * query_stride + head * query_head_stride)[:, None] + column, exists)
        position = context + first + m_of_scores // GROUP_SIZE
        result, use = _attend(query, keys, values, turns, use, position, context, first, length, factor, BLOCK_Q, HALF)
        result = gl.convert_layout(result.to(output_ptr.dtype.element_ty), layout)
        gl.store(output_ptr + (token * output_stride + head * HEAD_SIZE)[:, None] + column, result, mask=exists)
        number += 1
        kv_head, start, length, first, context = receive_item(items, number)
