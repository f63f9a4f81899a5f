"""Work items of rows of uneven length: every row is cut into items of equal size, found on the device.

`num_items` programs share the keys of all rows. An item is `span` keys of one row. The span follows from the lengths:
there are at most total / span + num_rows items, so with total / (num_items - num_rows) the programs always suffice.
Nothing of it depends on what the host knew of the lengths.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmkit_attention.triton_blocks import key_range, query_block

ROWS = tl.constexpr(256)  # rows that are looked at at once


@triton.jit
def _keys_of(rows, row, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr):
    """Keys that the tokens of each row see, from a multiple of BLOCK_N on; 0 for rows of other launches."""
    starts_ptr, seq_lens_ptr, num_rows, window, min_tokens, max_tokens = rows
    there = row < num_rows
    length = tl.load(starts_ptr + row + 1, mask=there, other=0) - tl.load(starts_ptr + row, mask=there, other=0)
    keys = tl.load(seq_lens_ptr + row, mask=there, other=0)
    if WINDOWED:
        keys -= tl.maximum(keys - length - window + 1, 0) // BLOCK_N * BLOCK_N
    return tl.where((length > min_tokens) & (length <= max_tokens), keys, 0)


@triton.jit
def item_span(rows, num_items, least_span, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr):
    """Keys of an item, a multiple of BLOCK_N. rows: see `triton_blocks`."""
    num_rows = rows[2]
    total = tl.zeros((), dtype=tl.int64)
    for start in range(0, num_rows, ROWS):
        row = start + tl.arange(0, ROWS)
        keys = _keys_of(rows, row, BLOCK_N, WINDOWED)
        total += tl.sum(keys.to(tl.int64), 0)
    share = tl.cdiv(total, num_items - num_rows).to(tl.int32)
    return tl.maximum(tl.cdiv(share, BLOCK_N) * BLOCK_N, least_span)


@triton.jit
def find_item(rows, item, span, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr):
    """(row, number of the item within the row); row num_rows if there are fewer items."""
    num_rows = rows[2]
    row_of_item = 0
    before = 0
    counted = 0
    for start in range(0, num_rows, ROWS):
        row = start + tl.arange(0, ROWS)
        keys = _keys_of(rows, row, BLOCK_N, WINDOWED)
        items = tl.cdiv(keys, span)
        ends = counted + tl.cumsum(items, 0)
        passed = (ends <= item) & (row < num_rows)
        row_of_item += tl.sum(passed.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(passed, ends, 0), 0))
        counted += tl.sum(items, 0)
    return row_of_item, item - before


@triton.jit
def items_before(rows, row, span, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr):
    """Number of the row's first item."""
    count = row * 0
    for start in range(0, row, ROWS):
        other = start + tl.arange(0, ROWS)
        keys = _keys_of(rows, other, BLOCK_N, WINDOWED)
        count += tl.sum(tl.where(other < row, tl.cdiv(keys, span), 0), 0)
    return count


@triton.jit
def keys_of_program(
    rows, block, least_span, num_splits, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr,
    ITEMS: tl.constexpr, ONE_PER_ROW: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """What a program of the attention kernel does; `block`: its query block or, with ITEMS, its item.

    (row, its first token, its number of tokens, first token of the query block within the row, tokens before these in
    the cache, lowest key that a query sees, first key and end of the keys of this program, whether the query block has
    no other program). Without anything to do, the first key is not before the end.
    """
    num_rows = rows[2]
    split = tl.program_id(2)
    item_keys = least_span
    any_item = True
    if ITEMS:
        item_keys = item_span(rows, tl.num_programs(1), least_span, BLOCK_N, WINDOWED)
        block, split = find_item(rows, block, item_keys, BLOCK_N, WINDOWED)
        any_item = block < num_rows
        block = tl.minimum(block, num_rows - 1)
    row, row_start, length, first, any_tokens = query_block(rows, block, BLOCK_Q, ONE_PER_ROW)
    context = tl.load(rows[1] + row) - length
    lowest, end, begin, span = key_range(
        context, length, first, rows[3], least_span, num_splits, BLOCK_Q, BLOCK_N, WINDOWED
    )
    alone = True
    if SPLIT:
        if ITEMS:
            span = item_keys
        alone = end - begin <= span
        begin += split * span
        end = tl.minimum(begin + span, end)
    end = tl.where(any_tokens & any_item, end, begin)
    return row, row_start, length, first, context, lowest, begin, end, alone
