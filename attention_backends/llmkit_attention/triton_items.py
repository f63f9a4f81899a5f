"""Work items of rows of uneven length: every row is cut into items of equal size, found on the device.

`num_items` programs share the keys of all rows. An item is `span` keys of one row. The span follows from the lengths:
there are at most total / span + num_rows items, so with total / (num_items - num_rows) the programs always suffice.
Nothing of it depends on what the host knew of the lengths.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = tl.constexpr(256)  # rows that are looked at at once


@triton.jit
def _keys_of(
    starts_ptr,
    seq_lens_ptr,
    row,
    num_rows,
    window,
    min_tokens,
    max_tokens,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Keys that the tokens of each row see, from a multiple of BLOCK_N on; 0 for rows of other launches."""
    there = row < num_rows
    length = tl.load(starts_ptr + row + 1, mask=there, other=0) - tl.load(starts_ptr + row, mask=there, other=0)
    keys = tl.load(seq_lens_ptr + row, mask=there, other=0)
    if WINDOWED:
        keys -= tl.maximum(keys - length - window + 1, 0) // BLOCK_N * BLOCK_N
    return tl.where((length > min_tokens) & (length <= max_tokens), keys, 0)


@triton.jit
def item_span(
    starts_ptr,
    seq_lens_ptr,
    num_rows,
    num_items,
    least_span,
    window,
    min_tokens,
    max_tokens,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Keys of an item, a multiple of BLOCK_N."""
    total = tl.zeros((), dtype=tl.int64)
    for start in range(0, num_rows, ROWS):
        row = start + tl.arange(0, ROWS)
        keys = _keys_of(starts_ptr, seq_lens_ptr, row, num_rows, window, min_tokens, max_tokens, BLOCK_N, WINDOWED)
        total += tl.sum(keys.to(tl.int64), 0)
    share = tl.cdiv(total, num_items - num_rows).to(tl.int32)
    return tl.maximum(tl.cdiv(share, BLOCK_N) * BLOCK_N, least_span)


@triton.jit
def find_item(
    starts_ptr,
    seq_lens_ptr,
    num_rows,
    item,
    span,
    window,
    min_tokens,
    max_tokens,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """(row, number of the item within the row); row num_rows if there are fewer items."""
    row_of_item = 0
    before = 0
    counted = 0
    for start in range(0, num_rows, ROWS):
        row = start + tl.arange(0, ROWS)
        keys = _keys_of(starts_ptr, seq_lens_ptr, row, num_rows, window, min_tokens, max_tokens, BLOCK_N, WINDOWED)
        items = tl.cdiv(keys, span)
        ends = counted + tl.cumsum(items, 0)
        passed = (ends <= item) & (row < num_rows)
        row_of_item += tl.sum(passed.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(passed, ends, 0), 0))
        counted += tl.sum(items, 0)
    return row_of_item, item - before


@triton.jit
def items_before(
    starts_ptr,
    seq_lens_ptr,
    num_rows,
    row,
    span,
    window,
    min_tokens,
    max_tokens,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Number of the row's first item."""
    count = row * 0
    for start in range(0, row, ROWS):
        other = start + tl.arange(0, ROWS)
        keys = _keys_of(starts_ptr, seq_lens_ptr, other, num_rows, window, min_tokens, max_tokens, BLOCK_N, WINDOWED)
        count += tl.sum(tl.where(other < row, tl.cdiv(keys, span), 0), 0)
    return count
