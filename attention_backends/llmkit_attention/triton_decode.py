"""Attention of rows of one token in one launch, from what the projection puts out: norms and rotary embedding of
queries and new keys, the write to the paged cache, attention, and the combination of rows whose keys were split.

Small batches take little longer than their launches do, so fewer of these are worth more than anything within. On GPUs
that can start a kernel before the one ahead of it has ended, a program has the first of the old keys and values in
shared memory before it waits, as no kernel of the same step writes them, and has asked for the others.

Keys are the rows of the products' tiles, query heads their columns: scores [keys, heads], results [head_size, heads].
The new key does not go through the cache: its score begins the online softmax (`triton_softmax` names the sources).
The cache goes through the functions here as one tuple: (cache_ptr at the KV head, table_ptr at the row, page_stride,
part_stride, page_shift), where a page has 2**page_shift tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmkit.jit.chain import LINE, ask_for, next_may_start, wait_for_last

COLUMNS = tl.constexpr(8)  # of scores: query heads of a KV head, its new key and whatever


@triton.jit
def _pages(cache, start, lowest, highest, N: tl.constexpr):
    """Pages of the keys from `start` [N]; only those of lowest..highest-1 are looked up."""
    _, table_ptr, _, _, page_shift = cache
    position = start + tl.arange(0, N)
    return tl.load(
        table_ptr + (position >> page_shift), mask=(position >= lowest) & (position < highest), other=0
    )  # fmt: skip


@triton.jit
def _block(cache, page, start, lowest, highest, N: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """(keys [N, HEAD_SIZE], values [HEAD_SIZE, N], which of them there are [N]) from `start`; zero outside
    lowest..highest-1."""
    head_ptr, _, page_stride, part_stride, page_shift = cache
    position = start + tl.arange(0, N)
    there = (position >= lowest) & (position < highest)
    cell = head_ptr + page.to(tl.int64) * page_stride + (position & ((1 << page_shift) - 1)) * HEAD_SIZE
    column = tl.arange(0, HEAD_SIZE)
    key = tl.load(cell[:, None] + column[None, :], mask=there[:, None], other=0.0)
    value = tl.load(cell[None, :] + part_stride + column[:, None], mask=there[None, :], other=0.0)
    return key, value, there


@triton.jit
def _ask_for_keys(cache, begin, end, N: tl.constexpr, HEAD_SIZE: tl.constexpr, BYTES: tl.constexpr):
    """Have keys and values begin..end-1 brought to the cache that all multiprocessors share."""
    head_ptr, table_ptr, page_stride, part_stride, page_shift = cache
    lines: tl.constexpr = HEAD_SIZE * BYTES // LINE
    column = tl.arange(0, lines if lines > 1 else 1) * (LINE // BYTES)
    for start in range(begin, end, N):
        position = tl.minimum(start + tl.arange(0, N), end - 1)
        page = tl.load(table_ptr + (position >> page_shift)).to(tl.int64)
        cell = head_ptr + page * page_stride + (position & ((1 << page_shift) - 1)) * HEAD_SIZE
        for part in tl.static_range(2):
            ask_for(cell[:, None] + column[None, :] + part * part_stride)


@triton.jit
def _span(
    row, seq_lens_ptr, window, least_span, num_splits, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr
):  # fmt: skip
    """(tokens of the row, the first key that it sees, begin and end of this program's, splits that the row has)."""
    length = tl.load(seq_lens_ptr + row)
    lowest = 0
    if WINDOWED:
        lowest = tl.maximum(length - window, 0)
    aligned = lowest // BLOCK_N * BLOCK_N
    span = tl.maximum(tl.cdiv(tl.cdiv(length - aligned, num_splits), BLOCK_N) * BLOCK_N, least_span)
    begin = aligned + tl.program_id(2) * span
    return length, lowest, begin, tl.minimum(begin + span, length), tl.cdiv(length - aligned, span)


@triton.jit
def _first_blocks(
    cache, begin, lowest, old, FIRST: tl.constexpr, SECOND: tl.constexpr, HEAD_SIZE: tl.constexpr
):  # fmt: skip
    """The first keys and values in two blocks, or one twice; pages are looked up for both at once."""
    page = _pages(cache, begin, lowest, old, FIRST)
    if SECOND:
        second_page = _pages(cache, begin + FIRST, lowest, old, SECOND)
        first = _block(cache, page, begin, lowest, old, FIRST, HEAD_SIZE)
        return first, _block(cache, second_page, begin + FIRST, lowest, old, SECOND, HEAD_SIZE)
    else:
        first = _block(cache, page, begin, lowest, old, FIRST, HEAD_SIZE)
        return first, first


@triton.jit
def _rotation(entry_ptr, HEAD_SIZE: tl.constexpr):
    """(cosines, sines, the sines' signs) of all columns."""
    half: tl.constexpr = HEAD_SIZE // 2
    column = tl.arange(0, HEAD_SIZE)
    entry = entry_ptr + column % half
    return tl.load(entry), tl.load(entry + half), (column // half * 2 - 1).to(tl.float32)


@triton.jit
def _tile_of(query_ptr, key_ptr, kinds, HEAD_SIZE: tl.constexpr):
    """Queries and the key, one below the other: their columns, and those that each is rotated with."""
    is_query, is_key = kinds
    column = tl.arange(0, HEAD_SIZE)[None, :]
    x = tl.load(query_ptr + column, mask=is_query, other=0.0) + tl.load(key_ptr + column, mask=is_key, other=0.0)
    column = (column + HEAD_SIZE // 2) % HEAD_SIZE
    other = tl.load(query_ptr + column, mask=is_query, other=0.0) + tl.load(key_ptr + column, mask=is_key, other=0.0)
    return x, other


@triton.jit
def _turned(heads, weights, turn, eps, NORMED: tl.constexpr):
    """Heads [h, HEAD_SIZE] normed and rotated, in their type and rounded where the reference rounds.

    heads, weights: pairs of the columns and of those that each is rotated with. turn: (cosines, sines, the sines'
    signs)."""
    x, other = heads
    cos, sin, sign = turn
    kind = x.dtype
    x, other = x.to(tl.float32), other.to(tl.float32)
    if NORMED:
        weight, other_weight = weights
        scale = tl.rsqrt(tl.sum(x * x, 1) / x.shape[1] + eps)[:, None]
        x = (x * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
        other = (other * scale).to(weight.dtype).to(tl.float32) * other_weight.to(tl.float32)
        x, other = x.to(kind).to(tl.float32), other.to(kind).to(tl.float32)
    return (x * cos[None, :] + other * sign[None, :] * sin[None, :]).to(kind)


@triton.jit
def _columns(x, ROWS: tl.constexpr):
    """x [ROWS, ...] as [COLUMNS, ...], with rows again if there are fewer: what a product takes at least."""
    if ROWS == COLUMNS:
        return x
    elif len(x.shape) == 1:
        return tl.reshape(tl.broadcast_to(x[None, :], (2, ROWS)), (COLUMNS,))
    else:
        return tl.reshape(tl.broadcast_to(x[None, :, :], (2, ROWS, x.shape[1])), (COLUMNS, x.shape[1]))


@triton.jit
def _capped(scores, cap, CAPPED: tl.constexpr):
    """cap * tanh(x), where tanh(x) = 1 - 2 / (exp(2x) + 1); the powers' other factors are in scores and cap."""
    return cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0)) if CAPPED else scores


@triton.jit
def _scores(key, queries, there, factor, cap, CAPPED: tl.constexpr):
    """[N, COLUMNS], base 2."""
    scores = _capped(tl.dot(key, queries, input_precision="ieee") * factor, cap, CAPPED)
    return tl.where(there[:, None], scores, -float("inf"))


@triton.jit
def _fold(
    first, second, queries, acc, total, peak, factor, cap,
    SECOND: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Two blocks of keys and values into the running sums, one reduction over warps for both; the second is as long or
    shorter, or left out."""
    key, value, there = first
    scores = _scores(key, queries, there, factor, cap, CAPPED)
    highest = scores
    if SECOND:
        second_key, second_value, second_there = second
        second_scores = _scores(second_key, queries, second_there, factor, cap, CAPPED)
        shape: tl.constexpr = (scores.shape[0] // second_scores.shape[0], second_scores.shape[0], scores.shape[1])
        highest = tl.maximum(tl.max(tl.reshape(scores, shape), 0), second_scores)
    new_peak = tl.maximum(tl.max(highest, 0), peak)
    shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    fade = tl.exp2(peak - shift)
    acc = acc * fade[None, :]
    weights = tl.exp2(scores - shift[None, :])
    of_key = weights
    if SECOND:
        second_weights = tl.exp2(second_scores - shift[None, :])
        acc = tl.dot(second_value, second_weights.to(second_value.dtype), acc, input_precision="ieee")
        of_key = tl.sum(tl.reshape(weights, shape), 0) + second_weights
    acc = tl.dot(value, weights.to(value.dtype), acc, input_precision="ieee")
    return acc, total * fade + tl.sum(of_key, 0), new_peak


@triton.jit
def _write(cache, slot, newest, turned, value, h, is_key, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """The new key, row GROUP of the tile, and value to their slot, if there is one and they are this program's."""
    head_ptr, _, page_stride, part_stride, page_shift = cache
    column = tl.arange(0, HEAD_SIZE)
    writes = tl.where(newest & (slot >= 0), 1, 0)
    cell = head_ptr + (slot >> page_shift) * page_stride + (slot & ((1 << page_shift) - 1)) * HEAD_SIZE + column
    tl.store(cell[None, :] + h * 0, turned, mask=is_key & (h < (GROUP + 1) * writes))
    tl.store(cell + part_stride, value, mask=column < HEAD_SIZE * writes)


@triton.jit
def _begun(
    turned, value, is_key, newest, factor, cap, ROWS: tl.constexpr, CAPPED: tl.constexpr
):  # fmt: skip
    """The running sums with the new key and value, or without any if they are another program's."""
    new_key = tl.sum(tl.where(is_key, turned.to(tl.float32), 0.0), 0)
    score = _columns(tl.sum(turned.to(tl.float32) * new_key[None, :], 1), ROWS)
    peak = tl.where(newest, _capped(score * factor, cap, CAPPED), -float("inf"))
    total = tl.full((COLUMNS,), 1.0, tl.float32) * tl.where(newest, 1.0, 0.0)
    return value.to(tl.float32)[:, None] * total[None, :], total, peak


@triton.jit(do_not_specialize=["table_stride", "page_shift", "window", "least_span", "num_splits"])
def decode_kernel(
    query_ptr, key_ptr, value_ptr, cache_ptr, output_ptr, query_norm_ptr, key_norm_ptr, positions_ptr, cos_sin_ptr,
    partial_ptr, lse_ptr, counter_ptr, seq_lens_ptr, table_ptr, slots_ptr,
    query_stride, key_stride, value_stride, page_stride, part_stride, head_stride,
    factor, cap, eps, table_stride, page_shift, window, least_span, num_splits,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_SIZE: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr, NORMED: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, EARLY: tl.constexpr, ASKS: tl.constexpr,
):  # fmt: skip
    """Grid: (KV heads, rows, num_splits). A program: GROUP query heads and their KV head, of one row, over some keys.

    query [rows, heads * HEAD_SIZE], key, value [rows, KV heads * HEAD_SIZE] as projected; output [rows, heads *
    HEAD_SIZE], dense. FIRST, SECOND (or 0): keys that are loaded before the wait; BLOCK_N: at a time behind them, and
    what splits are multiples of. PARTS: see `_combine`. EARLY: see `attention_kernel`. ASKS: for what is behind.
    """
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length, lowest, begin, end, used = _span(row, seq_lens_ptr, window, least_span, num_splits, BLOCK_N, WINDOWED)
    if begin >= end:  # no need to wait: the row's first program does, and with it whoever waits for all of them
        return
    old = tl.minimum(end, length - 1)
    behind = begin + FIRST + SECOND
    cache = (cache_ptr + head * head_stride, table_ptr + row * table_stride, page_stride, part_stride, page_shift)
    first, second = _first_blocks(cache, begin, lowest, old, FIRST, SECOND, HEAD_SIZE)
    if ASKS:
        _ask_for_keys(cache, behind, old, BLOCK_N, HEAD_SIZE, cache_ptr.dtype.element_ty.primitive_bitwidth // 8)
    rotation = _rotation(cos_sin_ptr + tl.load(positions_ptr + row) * HEAD_SIZE, HEAD_SIZE)
    slot = tl.load(slots_ptr + row)
    h, column = tl.arange(0, ROWS)[:, None], tl.arange(0, HEAD_SIZE)
    is_query, is_key = (h < GROUP) & (column >= 0)[None, :], (h == GROUP) & (column >= 0)[None, :]
    weights = (0.0, 0.0)
    if NORMED:
        weights = _tile_of(query_norm_ptr + h * 0, key_norm_ptr + h * 0, (is_query, is_key), HEAD_SIZE)
    if EARLY:
        wait_for_last()
        next_may_start()  # not before: weights that the next one loads would come ahead of keys and values
    query_row = query_ptr + row * query_stride + (head * GROUP + h) * HEAD_SIZE
    key_row = key_ptr + row * key_stride + head * HEAD_SIZE + h * 0
    heads = _tile_of(query_row, key_row, (is_query, is_key), HEAD_SIZE)
    value = tl.load(value_ptr + row * value_stride + head * HEAD_SIZE + column)
    turned = _turned(heads, weights, rotation, eps, NORMED)
    _write(cache, slot, end == length, turned, value, h, is_key, GROUP, HEAD_SIZE)
    acc, total, peak = _begun(turned, value, is_key, end == length, factor, cap, ROWS, CAPPED)
    queries = tl.trans(_columns(turned, ROWS))
    acc, total, peak = _fold(first, second, queries, acc, total, peak, factor, cap, SECOND, CAPPED)
    if behind < old:
        pages = _pages(cache, behind, lowest, old, BLOCK_N)
        for start in tl.range(behind, old, BLOCK_N, num_stages=STAGES):
            block = _block(cache, pages, start, lowest, old, BLOCK_N, HEAD_SIZE)
            pages = _pages(cache, start + BLOCK_N, lowest, old, BLOCK_N)
            acc, total, peak = _fold(block, block, queries, acc, total, peak, factor, cap, 0, CAPPED)
    number = row * tl.num_programs(0) + head
    parts = (partial_ptr, lse_ptr, counter_ptr + number, number * num_splits, used)
    _store(acc * (1.0 / total)[None, :], total, peak, output_ptr, number, parts, GROUP, HEAD_SIZE, PARTS)


@triton.jit
def _store(
    acc, total, peak, output_ptr, number, parts, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """The result [HEAD_SIZE, COLUMNS] of KV head `number`, counted over all rows, to its place, or to its split's."""
    lane, column = tl.arange(0, COLUMNS), tl.arange(0, HEAD_SIZE)
    out = output_ptr + (number * GROUP + lane)[None, :] * HEAD_SIZE + column[:, None]
    if parts[4] > 1:
        _combine(acc, peak + tl.log2(total), out, parts, GROUP, HEAD_SIZE, PARTS)
    else:
        tl.store(out, acc.to(output_ptr.dtype.element_ty), mask=(lane < GROUP)[None, :] & (column >= 0)[:, None])


@triton.jit
def _combine(acc, lse, out, parts, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, PARTS: tl.constexpr):
    """Keep the result [HEAD_SIZE, COLUMNS] of a split and its log-sum-exps; the last program to come combines all, in
    their order and PARTS at a time, and leaves the counter at 0, as it was before."""
    partial_ptr, lse_ptr, counter_ptr, before, used = parts
    lane, column = tl.arange(0, COLUMNS), tl.arange(0, HEAD_SIZE)
    is_head = (lane < GROUP)[None, :] & (column >= 0)[:, None]
    place = (before + tl.program_id(2)) * GROUP + lane
    tl.store(partial_ptr + place[None, :] * HEAD_SIZE + column[:, None], acc, mask=is_head)
    tl.store(lse_ptr + place, lse, mask=lane < GROUP)
    tl.debug_barrier()  # what all threads have written is made visible by one
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == used - 1:
        acc = tl.zeros((HEAD_SIZE, COLUMNS), dtype=tl.float32)
        total = tl.zeros((COLUMNS,), dtype=tl.float32)
        peak = tl.full((COLUMNS,), -float("inf"), dtype=tl.float32)
        for start in range(0, used, PARTS):
            for i in tl.static_range(PARTS):
                place = (before + start + i) * GROUP + lane
                there = lane < tl.where(start + i < used, GROUP, 0)
                # Past the multiprocessor's own cache, which may hold what an earlier layer has written there.
                lse = tl.load(lse_ptr + place, mask=there, other=-float("inf"), cache_modifier=".cg")
                cell = partial_ptr + place[None, :] * HEAD_SIZE + column[:, None]
                part = tl.load(cell, mask=is_head & there[None, :], other=0.0, cache_modifier=".cg")
                new_peak = tl.maximum(peak, lse)
                shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
                weight, fade = tl.exp2(lse - shift), tl.exp2(peak - shift)
                acc = acc * fade[None, :] + part * weight[None, :]
                total = total * fade + weight
                peak = new_peak
        acc = acc / tl.where(total > 0.0, total, 1.0)[None, :]  # columns of no head have none
        tl.store(out, acc.to(out.dtype.element_ty), mask=is_head)
        tl.store(counter_ptr, 0)
