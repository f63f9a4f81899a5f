"""Paged attention in Triton: one kernel for prompts, chunks and decodes.

Sources: the online softmax over blocks of keys is FlashAttention-2 (Dao, 2023), splitting a row's keys over programs
and combining by log-sum-exp is Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023), keys behind a block table are
PagedAttention (Kwon et al., 2023). `triton_blocks` says how queries are packed into tiles.

Triton compiles a kernel for every set of constants, in about a second: what costs nothing as a number, like the page
size, is one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmkit.jit.chain import next_may_start, wait_for_last
from llmkit_attention.triton_blocks import open_range, tile_rows
from llmkit_attention.triton_items import keys_of_program
from llmkit_attention.triton_prefix import add_prefix, prefix_parts
from llmkit_attention.triton_softmax import attend


@triton.jit(
    do_not_specialize=[
        "table_stride", "page_shift", "num_rows", "window", "least_span", "min_tokens", "max_tokens", "num_splits",
        "num_groups", "wanted", "most_splits",
    ]
)  # fmt: skip
def attention_kernel(
    query_ptr, cache_ptr, output_ptr, partial_ptr, lse_ptr, starts_ptr, seq_lens_ptr, table_ptr, group_starts_ptr,
    shared_lens_ptr, prefix_ptr, prefix_lse_ptr, query_stride, query_head_stride, output_stride, page_stride,
    part_stride, head_stride, factor, cap, table_stride, page_shift, num_rows, window, least_span, min_tokens,
    max_tokens, num_splits, num_groups, wanted, most_splits,
    GROUP_SIZE: tl.constexpr, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr, ITEMS: tl.constexpr,
    ONE_PER_ROW: tl.constexpr, PAGE: tl.constexpr, COMPUTE: tl.constexpr, CAPPED: tl.constexpr, FOLDED: tl.constexpr,
    SPLIT: tl.constexpr, PHASED: tl.constexpr, EARLY: tl.constexpr, PREFIX_ROWS: tl.constexpr,
):  # fmt: skip
    """Grid: (programs for heads, query blocks, splits). Rows with min_tokens < tokens <= max_tokens are computed.

    GROUP of the GROUP_SIZE query heads of a KV head are in one program. Without SPLIT the result is written; with it,
    the normalised result of the split and its log-sum-exp (base 2), for `combine_kernel`, unless a row has but one.
    ITEMS: the second dimension are the items of `triton_items`, the third is 1; only with SPLIT and ONE_PER_ROW.
    EARLY: the launch may start before the kernel ahead has ended, and lets the next one do so (`launch_pdl`).
    PAGE: see `triton_softmax`. FOLDED: the scale is positive and there is no cap, so that the largest score is known
    before it is scaled. PHASED: keys that all queries of the block see have a loop without masks.
    PREFIX_ROWS: 0, or rows that share keys (`triton_prefix`): what was computed of these is added, seq_lens are without
    them, and the table of such a row begins behind them.
    """
    if EARLY:
        next_may_start()
        if not PREFIX_ROWS:  # else `prefix_kernel` has done so before it let this one start
            wait_for_last()
    head_program = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # a row's last block has most to do
    place = (block.to(tl.int64) * tl.num_programs(0) + head_program) * num_splits + tl.program_id(2)
    row, row_start, length, first, context, lowest, begin, end, alone = keys_of_program(
        (starts_ptr, seq_lens_ptr, num_rows, window, min_tokens, max_tokens), block, least_span, num_splits,
        BLOCK_Q, BLOCK_N, WINDOWED, ITEMS, ONE_PER_ROW, SPLIT,
    )  # fmt: skip
    if begin >= end:
        return
    table_ptr += row.to(tl.int64) * table_stride
    if PREFIX_ROWS:
        prefix = (group_starts_ptr, shared_lens_ptr, num_groups, wanted, most_splits)
        shared, num_parts = prefix_parts(prefix, row, PREFIX_ROWS)
        table_ptr += shared >> page_shift
    token, head, exists = tile_rows(head_program, first, length, GROUP_SIZE, GROUP, BLOCK_Q, BLOCK_M)
    heads_ptr = query_ptr + ((row_start + token).to(tl.int64) * query_stride + head * query_head_stride)[:, None]
    query = _queries(heads_ptr, exists, HEAD_SIZE, BLOCK_D).to(COMPUTE)
    head_ptr = cache_ptr + head_program // tl.cdiv(GROUP_SIZE, GROUP) * head_stride
    cache = (head_ptr, table_ptr, page_stride, part_stride, page_shift)
    open_from, open_to = open_range(context, length, first, window, begin, end, BLOCK_Q, BLOCK_N, WINDOWED, PHASED)
    acc, lse = attend(
        query, context + token, cache, begin, open_from, open_to, end, lowest, window, factor, cap,
        HEAD_SIZE, BLOCK_D, BLOCK_M, BLOCK_N, PAGE, COMPUTE, WINDOWED, CAPPED, FOLDED, PHASED,
    )  # fmt: skip
    if PHASED:
        # Where results go is computed anew: kept over the loop, it would take registers that the products need.
        first += tl.load(starts_ptr + row, volatile=True) - row_start  # adds 0, which the compiler cannot know
        token, head, exists = tile_rows(head_program, first, length, GROUP_SIZE, GROUP, BLOCK_Q, BLOCK_M)
    if PREFIX_ROWS:
        queries = (row, head, num_rows, tl.where(begin == 0, num_parts, 0), exists)  # parts: once for every row
        acc, lse = _with_prefix(acc, lse, prefix_ptr, prefix_lse_ptr, queries, GROUP_SIZE, GROUP, BLOCK_D, EARLY)
    _store(
        acc, lse, (row_start + token, head, exists, token * 0 + alone), place,
        (output_ptr, output_stride, partial_ptr, lse_ptr), HEAD_SIZE, BLOCK_D, BLOCK_M, SPLIT,
    )  # fmt: skip


@triton.jit
def _queries(heads_ptr, exists, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """Heads at heads_ptr [m, 1] as [m, BLOCK_D]; zero where there is none, and past HEAD_SIZE."""
    column = tl.arange(0, BLOCK_D)
    return tl.load(heads_ptr + column[None, :], mask=exists[:, None] & (column < HEAD_SIZE)[None, :], other=0.0)


@triton.jit
def _with_prefix(
    acc, lse, prefix_ptr, prefix_lse_ptr, queries,
    GROUP_SIZE: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """(acc, lse) with what `prefix_kernel` has computed, once it has ended. queries: their (row, head, number of all
    rows, number of parts, whether there is such a query)."""
    row, head, num_rows, num_parts, exists = queries
    if EARLY:
        wait_for_last()
    heads = tl.num_programs(0) // tl.cdiv(GROUP_SIZE, GROUP) * GROUP_SIZE
    place, step = row.to(tl.int64) * heads + head, num_rows.to(tl.int64) * heads
    return add_prefix(acc, lse, prefix_ptr, prefix_lse_ptr, place, step, num_parts, exists, BLOCK_D)


@triton.jit
def _store(
    acc, lse, rows, place, memory,
    HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Results of a tile to where they belong: with SPLIT to part `place`, but for rows that have no other.

    rows, of the tile: (token of the batch, query head, whether there is such a query, whether its keys were not split).
    """
    token, head, exists, alone = rows
    output_ptr, output_stride, partial_ptr, lse_ptr = memory
    column = tl.arange(0, BLOCK_D)
    if SPLIT:
        slots = place * BLOCK_M + tl.arange(0, BLOCK_M)
        _store_part(partial_ptr, lse_ptr, acc, lse, slots, exists & (alone == 0), BLOCK_D)
        exists = exists & (alone != 0)
    cell = output_ptr + (token.to(tl.int64) * output_stride + head * HEAD_SIZE)[:, None] + column[None, :]
    tl.store(cell, acc.to(output_ptr.dtype.element_ty), mask=exists[:, None] & (column < HEAD_SIZE)[None, :])


@triton.jit
def _store_part(partial_ptr, lse_ptr, acc, lse, slots, mask, BLOCK_D: tl.constexpr):
    """The result of one split, for `combine_kernel`."""
    tl.store(partial_ptr + slots[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :], acc, mask=mask[:, None])
    tl.store(lse_ptr + slots, lse, mask=mask)
