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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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
    query_ptr, cache_ptr, output_ptr, partial_ptr, lse_ptr, starts_ptr, seq_lens_ptr, table_ptr,
    group_starts_ptr, shared_lens_ptr, prefix_ptr, prefix_lse_ptr,
    query_stride, query_head_stride, output_stride, page_stride, part_stride, head_stride,
    factor, cap, table_stride, page_shift, num_rows, window, least_span, min_tokens, max_tokens, num_splits,
    num_groups, wanted, most_splits,
    GROUP_SIZE: tl.constexpr, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr,
    HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr, ITEMS: tl.constexpr, ONE_PER_ROW: tl.constexpr,
    PAGE: tl.constexpr, COMPUTE: tl.constexpr, CAPPED: tl.constexpr, FOLDED: tl.constexpr,
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
        gdc_launch_dependents()
        if not PREFIX_ROWS:  # else `prefix_kernel` has done so before it let this one start
            gdc_wait()
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
    column = tl.arange(0, BLOCK_D)
    cell = (
        query_ptr
        + ((row_start + token).to(tl.int64) * query_stride + head * query_head_stride)[:, None]
        + column[None, :]
    )
    query = tl.load(cell, mask=exists[:, None] & (column < HEAD_SIZE)[None, :], other=0.0).to(COMPUTE)
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
        if EARLY:
            gdc_wait()
        heads = tl.num_programs(0) // tl.cdiv(GROUP_SIZE, GROUP) * GROUP_SIZE
        num_parts = tl.where(begin == 0, num_parts, 0)  # once for every row
        acc, lse = add_prefix(
            acc, lse, prefix_ptr, prefix_lse_ptr, row.to(tl.int64) * heads + head, num_rows.to(tl.int64) * heads,
            num_parts, exists, BLOCK_D,
        )  # fmt: skip
    if SPLIT:
        slots = place * BLOCK_M + tl.arange(0, BLOCK_M)
        _store_part(partial_ptr, lse_ptr, acc, lse, slots, exists & (token * 0 + alone == 0), BLOCK_D)
        exists = exists & (token * 0 + alone != 0)
    cell = output_ptr + ((row_start + token).to(tl.int64) * output_stride + head * HEAD_SIZE)[:, None] + column[None, :]
    tl.store(cell, acc.to(output_ptr.dtype.element_ty), mask=exists[:, None] & (column < HEAD_SIZE)[None, :])


@triton.jit
def _store_part(partial_ptr, lse_ptr, acc, lse, slots, mask, BLOCK_D: tl.constexpr):
    """The result of one split, for `combine_kernel`."""
    tl.store(partial_ptr + slots[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :], acc, mask=mask[:, None])
    tl.store(lse_ptr + slots, lse, mask=mask)
