"""Paged attention in Triton: one kernel for prompts, chunks and decodes, and one that combines split sequences.

Sources: the online softmax over blocks of keys is FlashAttention-2 (Dao, 2023), splitting a row's keys over programs
and combining by log-sum-exp is Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023), keys behind a block table are
PagedAttention (Kwon et al., 2023).

A *query block* is up to BLOCK_Q consecutive tokens of one row. It is packed with the GROUP query heads that share a
KV head into the BLOCK_M rows of a tile: row m is token m // GROUP, head m % GROUP. So keys are loaded once for the
group. Query blocks are numbered so that row r's begin at number query_start_loc[r] // BLOCK_Q + r; a few numbers are
left unused, and in return the grid depends on the numbers of tokens and rows alone. Lengths are read on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmkit_attention.triton_items import find_item, item_span, items_before


@triton.jit
def _query_block(starts_ptr, block, num_rows, BLOCK_Q: tl.constexpr, ONE_PER_ROW: tl.constexpr):
    """(row, its first token, its number of tokens, first token of query block number `block` within the row)."""
    if ONE_PER_ROW:
        row = block
        first = 0
    else:
        low = 0
        high = num_rows
        while low < high:  # the last row whose blocks begin at or before this one
            middle = (low + high) // 2
            begins = tl.load(starts_ptr + middle) // BLOCK_Q + middle
            if begins <= block:
                low = middle + 1
            else:
                high = middle
        row = low - 1
        first = (block - (tl.load(starts_ptr + row) // BLOCK_Q + row)) * BLOCK_Q
    start = tl.load(starts_ptr + row)
    return row, start, tl.load(starts_ptr + row + 1) - start, first


@triton.jit
def _key_range(
    context,
    length,
    first,
    window,
    least_span,
    num_splits,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    W: tl.constexpr,
):
    """Keys that a query block sees, lowest..end-1, the aligned start of its first split, and keys per split.

    Splits are at least `least_span` keys long, and long enough that num_splits of them suffice.
    """
    end = context + tl.minimum(first + BLOCK_Q, length)
    lowest = 0
    if W:
        lowest = tl.maximum(context + first - window + 1, 0)
    aligned = lowest // BLOCK_N * BLOCK_N
    span = tl.cdiv(tl.cdiv(end - aligned, num_splits), BLOCK_N) * BLOCK_N
    return lowest, end, aligned, tl.maximum(span, least_span)


@triton.jit
def _pages(table_ptr, start, lowest, highest, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages of the keys from `start`: one for all if a page holds the whole block, else one for each. Nothing outside
    lowest..highest-1 is read."""
    if PAGE % BLOCK_N == 0:
        return tl.load(table_ptr + start // PAGE, mask=start < highest, other=0)
    else:
        key_position = start + tl.arange(0, BLOCK_N)
        inside = (key_position >= lowest) & (key_position < highest)
        return tl.load(table_ptr + key_position // PAGE, mask=inside, other=0)


@triton.jit
def _attend(
    acc,
    total,
    peak,
    query,
    position,
    cache_ptr,
    table_ptr,
    begin,
    end,
    lowest,
    highest,
    window,
    factor,
    cap,
    page_stride,
    part_stride,
    PAGE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COMPUTE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    FOLDED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold keys begin..end-1 into the running sums. With MASKED, those outside lowest..highest-1 are not touched, and
    of the others every query sees its own; without, every query sees all."""
    column = tl.arange(0, BLOCK_D)
    page = _pages(table_ptr, begin, lowest, tl.minimum(highest, end), PAGE, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        key_position = start + tl.arange(0, BLOCK_N)
        touched = (key_position >= lowest) & (key_position < highest)
        place = page.to(tl.int64) * page_stride + (key_position % PAGE) * HEAD_SIZE
        # One block ahead: were it loaded where it is needed, Triton would spend half of the pipeline's stages on it.
        page = _pages(table_ptr, start + BLOCK_N, lowest, tl.minimum(highest, end), PAGE, BLOCK_N)
        cell = cache_ptr + place[:, None] + column[None, :]
        if MASKED:
            inside = touched[:, None] & (column < HEAD_SIZE)[None, :]
            key = tl.load(cell, mask=inside, other=0.0)
            value = tl.load(cell + part_stride, mask=inside, other=0.0)
        elif HEAD_SIZE != BLOCK_D:
            key = tl.load(cell, mask=(column < HEAD_SIZE)[None, :], other=0.0)
            value = tl.load(cell + part_stride, mask=(column < HEAD_SIZE)[None, :], other=0.0)
        else:
            key = tl.load(cell)
            value = tl.load(cell + part_stride)
        scores = tl.dot(query, tl.trans(key.to(COMPUTE)), input_precision="ieee")
        if not FOLDED:
            scores = scores * factor
        if CAPPED:
            # cap * tanh(x), where tanh(x) = 1 - 2 / (exp(2x) + 1); `factor` and `cap` hold the powers' other factors.
            scores = cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
        if MASKED:
            visible = touched[None, :] & (key_position[None, :] <= position[:, None])
            if WINDOWED:
                visible = visible & (key_position[None, :] > position[:, None] - window)
            scores = tl.where(visible, scores, -float("inf"))
        highest_score = tl.max(scores, 1)
        if FOLDED:  # into the subtraction below: one multiplication and addition for each score
            highest_score = highest_score * factor
        new_peak = tl.maximum(peak, highest_score)
        shift = new_peak
        if MASKED:  # a query may have seen nothing yet
            shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        if FOLDED:
            weights = tl.exp2(scores * factor - shift[:, None])
        else:
            weights = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(peak - shift)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        acc = tl.dot(weights.to(COMPUTE), value.to(COMPUTE), acc, input_precision="ieee")
        peak = new_peak
    return acc, total, peak


@triton.jit(
    do_not_specialize=["table_stride", "num_rows", "window", "least_span", "min_tokens", "max_tokens", "num_splits"]
)
def attention_kernel(
    query_ptr,
    cache_ptr,
    output_ptr,
    partial_ptr,
    lse_ptr,
    starts_ptr,
    seq_lens_ptr,
    table_ptr,
    query_stride,
    query_head_stride,
    output_stride,
    page_stride,
    part_stride,
    head_stride,
    factor,
    cap,
    table_stride,
    num_rows,
    window,
    least_span,
    min_tokens,
    max_tokens,
    num_splits,
    GROUP_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COMPUTE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    FOLDED: tl.constexpr,
    SPLIT: tl.constexpr,
    ITEMS: tl.constexpr,
    ONE_PER_ROW: tl.constexpr,
    PHASED: tl.constexpr,
):
    """Grid: (programs for heads, query blocks, splits). Rows with min_tokens < tokens <= max_tokens are computed.

    GROUP of the GROUP_SIZE query heads of a KV head are in one program. Without SPLIT the result is written; with it,
    the normalised result of the split and its log-sum-exp (base 2), for `combine_kernel`, unless a row has but one.
    ITEMS: the second dimension are the items of `triton_items`, the third is 1; only with SPLIT and ONE_PER_ROW.
    FOLDED: the scale is positive and there is no cap, so that the largest score is known before it is scaled.
    PHASED: keys that all queries of the block see go through a loop without masks, the others through another.
    """
    PER_KV_HEAD: tl.constexpr = (GROUP_SIZE + GROUP - 1) // GROUP
    head_program = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # a row's last block has most to do
    split = tl.program_id(2)
    place = (block.to(tl.int64) * tl.num_programs(0) + head_program) * num_splits + split
    item_keys = least_span
    if ITEMS:
        item_keys = item_span(
            starts_ptr, seq_lens_ptr, num_rows, tl.num_programs(1), least_span, window, min_tokens, max_tokens,
            BLOCK_N, WINDOWED,
        )  # fmt: skip
        block, split = find_item(
            starts_ptr, seq_lens_ptr, num_rows, block, item_keys, window, min_tokens, max_tokens, BLOCK_N, WINDOWED
        )
        if block >= num_rows:
            return
    row, row_start, length, first = _query_block(starts_ptr, block, num_rows, BLOCK_Q, ONE_PER_ROW)
    if (first >= length) | (length <= min_tokens) | (length > max_tokens):
        return
    context = tl.load(seq_lens_ptr + row) - length
    lowest, end, aligned, span = _key_range(
        context, length, first, window, least_span, num_splits, BLOCK_Q, BLOCK_N, WINDOWED
    )
    if ITEMS:
        span = item_keys
    begin = aligned
    all_keys = end - aligned
    if SPLIT:
        begin = aligned + split * span
        end = tl.minimum(begin + span, end)
        if begin >= end:
            return

    kv_head = head_program // PER_KV_HEAD
    m = tl.arange(0, BLOCK_M)
    token = first + m // GROUP
    head_of_group = head_program % PER_KV_HEAD * GROUP + m % GROUP
    head = kv_head * GROUP_SIZE + head_of_group
    exists = (m // GROUP < BLOCK_Q) & (token < length) & (head_of_group < GROUP_SIZE)
    column = tl.arange(0, BLOCK_D)
    cells = exists[:, None] & (column < HEAD_SIZE)[None, :]
    where = (row_start + token).to(tl.int64)
    query = tl.load(
        query_ptr + (where * query_stride + head * query_head_stride)[:, None] + column[None, :], mask=cells, other=0.0
    ).to(COMPUTE)
    position = context + token
    table_ptr += row.to(tl.int64) * table_stride
    cache_ptr += kv_head * head_stride

    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    peak = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    open_from = begin
    open_to = begin
    if PHASED:
        if WINDOWED:
            last = context + tl.minimum(first + BLOCK_Q, length) - 1
            open_from = tl.cdiv(tl.maximum(last - window + 1, 0), BLOCK_N) * BLOCK_N
            open_from = tl.minimum(tl.maximum(open_from, begin), end)
        open_to = tl.minimum((context + first + 1) // BLOCK_N * BLOCK_N, end // BLOCK_N * BLOCK_N)
        open_to = tl.maximum(open_to, open_from)
        if WINDOWED:
            acc, total, peak = _attend(
                acc, total, peak, query, position, cache_ptr, table_ptr, begin, open_from, lowest, end, window, factor,
                cap, page_stride, part_stride, PAGE, HEAD_SIZE, BLOCK_D, BLOCK_N, COMPUTE, WINDOWED, CAPPED, FOLDED,
                True,
            )  # fmt: skip
        acc, total, peak = _attend(
            acc, total, peak, query, position, cache_ptr, table_ptr, open_from, open_to, lowest, end, window, factor,
            cap, page_stride, part_stride, PAGE, HEAD_SIZE, BLOCK_D, BLOCK_N, COMPUTE, WINDOWED, CAPPED, FOLDED,
            False,
        )  # fmt: skip
    acc, total, peak = _attend(
        acc, total, peak, query, position, cache_ptr, table_ptr, open_to, end, lowest, end, window, factor,
        cap, page_stride, part_stride, PAGE, HEAD_SIZE, BLOCK_D, BLOCK_N, COMPUTE, WINDOWED, CAPPED, FOLDED,
        True,
    )  # fmt: skip

    seen = total > 0.0
    acc = acc / tl.where(seen, total, 1.0)[:, None]
    if SPLIT:
        slots = place * BLOCK_M + m
        parts = exists & (m * 0 + all_keys > span)
        tl.store(partial_ptr + slots[:, None] * BLOCK_D + column[None, :], acc, mask=parts[:, None])
        tl.store(lse_ptr + slots, tl.where(seen, peak + tl.log2(total), -float("inf")), mask=parts)
        cells = cells & (m * 0 + all_keys <= span)[:, None]
    tl.store(
        output_ptr + where[:, None] * output_stride + head[:, None] * HEAD_SIZE + column[None, :],
        acc.to(output_ptr.dtype.element_ty),
        mask=cells,
    )


@triton.jit(
    do_not_specialize=["num_rows", "window", "least_span", "min_tokens", "max_tokens", "num_splits", "num_items"]
)
def combine_kernel(
    output_ptr,
    partial_ptr,
    lse_ptr,
    starts_ptr,
    seq_lens_ptr,
    output_stride,
    num_rows,
    window,
    least_span,
    min_tokens,
    max_tokens,
    num_splits,
    num_items,
    GROUP_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
    ITEMS: tl.constexpr,
    ONE_PER_ROW: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Grid: (programs for heads, query blocks, BLOCK_M): one token of one head. Arguments as for `attention_kernel`."""
    PER_KV_HEAD: tl.constexpr = (GROUP_SIZE + GROUP - 1) // GROUP
    head_program = tl.program_id(0)
    block = tl.program_id(1)
    m = tl.program_id(2)
    row, row_start, length, first = _query_block(starts_ptr, block, num_rows, BLOCK_Q, ONE_PER_ROW)
    token = first + m // GROUP
    head_of_group = head_program % PER_KV_HEAD * GROUP + m % GROUP
    if (m // GROUP >= BLOCK_Q) | (token >= length) | (head_of_group >= GROUP_SIZE):
        return
    if (length <= min_tokens) | (length > max_tokens):
        return
    context = tl.load(seq_lens_ptr + row) - length
    _, end, aligned, span = _key_range(
        context, length, first, window, least_span, num_splits, BLOCK_Q, BLOCK_N, WINDOWED
    )
    if ITEMS:
        span = item_span(
            starts_ptr, seq_lens_ptr, num_rows, num_items, least_span, window, min_tokens, max_tokens, BLOCK_N, WINDOWED
        )
    used = tl.cdiv(end - aligned, span)
    if used <= 1:  # it is written already
        return
    if ITEMS:
        item = items_before(
            starts_ptr, seq_lens_ptr, num_rows, row, span, window, min_tokens, max_tokens, BLOCK_N, WINDOWED
        )
        slot = (item.to(tl.int64) * tl.num_programs(0) + head_program) * BLOCK_M + m
        step = tl.num_programs(0) * BLOCK_M
    else:
        slot = (block.to(tl.int64) * tl.num_programs(0) + head_program) * num_splits * BLOCK_M + m
        step = BLOCK_M
    column = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), dtype=tl.float32)
    total = 0.0
    peak = -float("inf")
    for start in range(0, used, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        places = slot + split * step
        lse = tl.load(lse_ptr + places, mask=split < used, other=-float("inf"))
        part = tl.load(
            partial_ptr + places[:, None] * BLOCK_D + column[None, :], mask=(split < used)[:, None], other=0.0
        )
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        weights = tl.exp2(lse - shift)
        fade = tl.exp2(peak - shift)
        acc = acc * fade + tl.sum(part * weights[:, None], 0)
        total = total * fade + tl.sum(weights, 0)
        peak = new_peak
    acc = acc / tl.where(total > 0.0, total, 1.0)
    head = head_program // PER_KV_HEAD * GROUP_SIZE + head_of_group
    place = (row_start + token).to(tl.int64) * output_stride + head * HEAD_SIZE
    tl.store(output_ptr + place + column, acc.to(output_ptr.dtype.element_ty), mask=column < HEAD_SIZE)
