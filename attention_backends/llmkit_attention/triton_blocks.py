"""Which tokens, heads and keys a program of the attention kernels works on.

A *query block* is up to BLOCK_Q consecutive tokens of one row. It is packed with the GROUP query heads that share a
KV head into the BLOCK_M rows of a tile: row m is token m // GROUP, head m % GROUP. So keys are loaded once for the
group. Query blocks are numbered so that row r's begin at number query_start_loc[r] // BLOCK_Q + r; a few numbers are
left unused, and in return the grid depends on the numbers of tokens and rows alone. Lengths are read on the device.

What the kernels know of the batch goes through the functions here and in `triton_items` as one tuple, `rows`:
(starts_ptr, seq_lens_ptr, num_rows, window, min_tokens, max_tokens). Rows with min_tokens < tokens <= max_tokens are
those of the launch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def query_block(rows, block, BLOCK_Q: tl.constexpr, ONE_PER_ROW: tl.constexpr):
    """(row, its first token, its number of tokens, first token of query block number `block` within the row, whether
    the block has tokens of this launch)."""
    starts_ptr, _, num_rows, _, min_tokens, max_tokens = rows
    row = block
    first = block * 0
    if not ONE_PER_ROW:
        row = _row_of(starts_ptr, num_rows, block, BLOCK_Q)
        first = (block - (tl.load(starts_ptr + row) // BLOCK_Q + row)) * BLOCK_Q
    start = tl.load(starts_ptr + row)
    length = tl.load(starts_ptr + row + 1) - start
    return row, start, length, first, (first < length) & (length > min_tokens) & (length <= max_tokens)


@triton.jit
def _row_of(starts_ptr, num_rows, block, BLOCK_Q: tl.constexpr):
    """The last row whose blocks begin at `block` or before it."""
    low = 0
    high = num_rows
    while low < high:
        middle = (low + high) // 2
        begins = tl.load(starts_ptr + middle) // BLOCK_Q + middle
        if begins <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def key_range(
    context,
    length,
    first,
    window,
    least_span,
    num_splits,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Keys that a query block sees, lowest..end-1, the aligned start of its first split, and keys per split.

    Splits are at least `least_span` keys long, and long enough that num_splits of them suffice.
    """
    end = context + tl.minimum(first + BLOCK_Q, length)
    lowest = 0
    if WINDOWED:
        lowest = tl.maximum(context + first - window + 1, 0)
    aligned = lowest // BLOCK_N * BLOCK_N
    span = tl.cdiv(tl.cdiv(end - aligned, num_splits), BLOCK_N) * BLOCK_N
    return lowest, end, aligned, tl.maximum(span, least_span)


@triton.jit
def open_range(
    context, length, first, window, begin, end,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr, PHASED: tl.constexpr,
):  # fmt: skip
    """Of the keys begin..end-1, those of whole blocks that all queries of the query block see; none if not PHASED."""
    open_from = begin
    open_to = begin
    if PHASED:
        if WINDOWED:
            last = context + tl.minimum(first + BLOCK_Q, length) - 1
            open_from = tl.cdiv(tl.maximum(last - window + 1, 0), BLOCK_N) * BLOCK_N
            open_from = tl.minimum(tl.maximum(open_from, begin), end)
        open_to = tl.minimum((context + first + 1) // BLOCK_N * BLOCK_N, end // BLOCK_N * BLOCK_N)
        open_to = tl.maximum(open_to, open_from)
    return open_from, open_to


@triton.jit
def tile_rows(
    head_program, first, length,
    GROUP_SIZE: tl.constexpr, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Of every row of the tile: (token within the row of the batch, query head, whether there is such a query)."""
    return tile_row(tl.arange(0, BLOCK_M), head_program, first, length, GROUP_SIZE, GROUP, BLOCK_Q)


@triton.jit
def tile_row(m, head_program, first, length, GROUP_SIZE: tl.constexpr, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr):
    """As `tile_rows`, of row m or rows m."""
    PROGRAMS: tl.constexpr = (GROUP_SIZE + GROUP - 1) // GROUP
    token = first + m // GROUP
    head_of_group = head_program % PROGRAMS * GROUP + m % GROUP
    exists = (m // GROUP < BLOCK_Q) & (token < length) & (head_of_group < GROUP_SIZE)
    return token, head_program // PROGRAMS * GROUP_SIZE + head_of_group, exists
