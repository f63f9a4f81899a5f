"""The kernel that combines the results of split sequences, see `attention_kernel`."""

from __future__ import annotations

import triton
import triton.language as tl

from llmkit.jit.chain import next_may_start, wait_for_last
from llmkit_attention.triton_blocks import key_range, query_block, tile_row
from llmkit_attention.triton_items import item_span, items_before


@triton.jit(
    do_not_specialize=[
        "num_rows", "window", "least_span", "min_tokens", "max_tokens",
        "num_splits", "num_items",
    ]
)  # fmt: skip
def combine_kernel(
    output_ptr, partial_ptr, lse_ptr, starts_ptr, seq_lens_ptr, output_stride,
    num_rows, window, least_span, min_tokens, max_tokens, num_splits, num_items,
    GROUP_SIZE: tl.constexpr, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr,
    HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr, ITEMS: tl.constexpr, ONE_PER_ROW: tl.constexpr, BLOCK_S: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: (programs for heads, query blocks, BLOCK_M): one token of one head. Arguments as for `attention_kernel`;
    BLOCK_S: parts at a time."""
    if EARLY:
        next_may_start()
        wait_for_last()
    rows = (starts_ptr, seq_lens_ptr, num_rows, window, min_tokens, max_tokens)
    head_program = tl.program_id(0)
    block = tl.program_id(1)
    m = tl.program_id(2)
    row, row_start, length, first, any_tokens = query_block(rows, block, BLOCK_Q, ONE_PER_ROW)
    token, head, exists = tile_row(m, head_program, first, length, GROUP_SIZE, GROUP, BLOCK_Q)
    if not (any_tokens & exists):
        return
    context = tl.load(seq_lens_ptr + row) - length
    _, end, aligned, span = key_range(
        context, length, first, window, least_span, num_splits, BLOCK_Q, BLOCK_N, WINDOWED
    )
    if ITEMS:
        span = item_span(rows, num_items, least_span, BLOCK_N, WINDOWED)
    used = tl.cdiv(end - aligned, span)
    if used <= 1:  # it is written already
        return
    if ITEMS:
        place = items_before(rows, row, span, BLOCK_N, WINDOWED).to(tl.int64) * tl.num_programs(0) + head_program
        step = tl.num_programs(0) * BLOCK_M
    else:
        place = (block.to(tl.int64) * tl.num_programs(0) + head_program) * num_splits
        step = BLOCK_M
    acc = _combined(partial_ptr, lse_ptr, place * BLOCK_M + m, step, used, BLOCK_D, BLOCK_S)
    column = tl.arange(0, BLOCK_D)
    output_cell = output_ptr + (row_start + token).to(tl.int64) * output_stride + head * HEAD_SIZE + column
    tl.store(output_cell, acc.to(output_ptr.dtype.element_ty), mask=column < HEAD_SIZE)


@triton.jit
def _combined(partial_ptr, lse_ptr, slot, step, used, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr):
    """The parts at slot, slot + step, …, `used` of them, weighted by their log-sum-exps: float32 [BLOCK_D]."""
    column = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), dtype=tl.float32)
    total = 0.0
    peak = -float("inf")
    for start in range(0, used, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        places = slot + split * step
        lse = tl.load(lse_ptr + places, mask=split < used, other=-float("inf"))
        cells = partial_ptr + places[:, None] * BLOCK_D + column[None, :]
        part = tl.load(cells, mask=(split < used)[:, None], other=0.0)
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        weights = tl.exp2(lse - shift)
        fade = tl.exp2(peak - shift)
        acc = acc * fade + tl.sum(part * weights[:, None], 0)
        total = total * fade + tl.sum(weights, 0)
        peak = new_peak
    return acc / tl.where(total > 0.0, total, 1.0)
