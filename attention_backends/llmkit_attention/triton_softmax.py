"""The inner loop: blocks of keys and values behind a block table, folded into the running sums of an online softmax.

The cache goes through these functions as one tuple, `cache`: (cache_ptr, table_ptr, page_stride, part_stride,
page_shift), where cache_ptr is at the KV head, table_ptr at the row, and a page has 2**page_shift tokens. PAGE is this
number of tokens where it is smaller than a block of keys, else 0: then a page holds whole blocks.
The running sums are acc [BLOCK_M, BLOCK_D], total [BLOCK_M] and peak [BLOCK_M], the largest score so far (base 2).
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmkit.jit.float8 import widened


@triton.jit
def _pages(table_ptr, page_shift, start, lowest, highest, BLOCK_N: tl.constexpr, PAGE: tl.constexpr):
    """Pages of the keys from `start`: one for all if a page holds the whole block, else one for each. Nothing outside
    lowest..highest-1 is read."""
    first = table_ptr + (start >> page_shift)
    if PAGE == 0:
        return tl.load(first, mask=start < highest, other=0)
    else:
        key = tl.arange(0, BLOCK_N)
        inside = (start + key >= lowest) & (start + key < highest)
        return tl.load(first + key // PAGE, mask=inside, other=0)


@triton.jit
def _cells(
    cache, page, start, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr
):
    """Where the keys from `start` are, [BLOCK_N, BLOCK_D]. A block begins with a page or lies within one, so all but
    the page's own address is the same for every block."""
    cache_ptr, _, page_stride, _, page_shift = cache
    key = tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_D)
    if PAGE == 0:
        in_page = start & ((1 << page_shift) - 1)
        base = cache_ptr + page.to(tl.int64) * page_stride + in_page * HEAD_SIZE
        return base + (key * HEAD_SIZE)[:, None] + column[None, :]
    else:
        base = cache_ptr + page.to(tl.int64) * page_stride + key % PAGE * HEAD_SIZE
        return base[:, None] + column[None, :]


@triton.jit
def _load_block(cell, part_stride, touched, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """(keys, values), [BLOCK_N, BLOCK_D] each; zero where nothing is touched, and past HEAD_SIZE."""
    if MASKED:
        inside = touched[:, None] & (tl.arange(0, BLOCK_D) < HEAD_SIZE)[None, :]
        return tl.load(cell, mask=inside, other=0.0), tl.load(cell + part_stride, mask=inside, other=0.0)
    elif HEAD_SIZE != BLOCK_D:
        inside = (tl.arange(0, BLOCK_D) < HEAD_SIZE)[None, :]
        return tl.load(cell, mask=inside, other=0.0), tl.load(cell + part_stride, mask=inside, other=0.0)
    else:
        return tl.load(cell), tl.load(cell + part_stride)


@triton.jit
def _scores(query, key, factor, cap, CAPPED: tl.constexpr, FOLDED: tl.constexpr):
    """[BLOCK_M, BLOCK_N], base 2; with FOLDED, `factor` is left to `_weights`."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if not FOLDED:
        scores = scores * factor
    if CAPPED:
        # cap * tanh(x), where tanh(x) = 1 - 2 / (exp(2x) + 1); `factor` and `cap` hold the powers' other factors.
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    return scores


@triton.jit
def _weights(scores, peak, factor, FOLDED: tl.constexpr, MASKED: tl.constexpr):
    """(weights of the scores, what the sums so far fade by, the new peak)."""
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
    return weights, tl.exp2(peak - shift), new_peak


@triton.jit
def fold_keys(
    acc, total, peak, query, position, cache, begin, end, lowest, highest, window, factor, cap,
    HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    COMPUTE: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, FOLDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold keys begin..end-1 into the running sums; `begin` is a multiple of BLOCK_N. With MASKED, those outside
    lowest..highest-1 are not touched, and of the others every query sees its own; without, every query sees all."""
    _, table_ptr, _, part_stride, page_shift = cache
    page = _pages(table_ptr, page_shift, begin, lowest, tl.minimum(highest, end), BLOCK_N, PAGE)
    for start in range(begin, end, BLOCK_N):
        key_position = start + tl.arange(0, BLOCK_N)
        touched = (key_position >= lowest) & (key_position < highest)
        cell = _cells(cache, page, start, HEAD_SIZE, BLOCK_D, BLOCK_N, PAGE)
        # One block ahead: were it loaded where it is needed, Triton would spend half of the pipeline's stages on it.
        page = _pages(table_ptr, page_shift, start + BLOCK_N, lowest, tl.minimum(highest, end), BLOCK_N, PAGE)
        key, value = _load_block(cell, part_stride, touched, HEAD_SIZE, BLOCK_D, MASKED)
        scores = _scores(query, widened(key, COMPUTE), factor, cap, CAPPED, FOLDED)
        if MASKED:
            visible = touched[None, :] & (key_position[None, :] <= position[:, None])
            if WINDOWED:
                visible = visible & (key_position[None, :] > position[:, None] - window)
            scores = tl.where(visible, scores, -float("inf"))
        weights, fade, peak = _weights(scores, peak, factor, FOLDED, MASKED)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        acc = tl.dot(weights.to(COMPUTE), widened(value, COMPUTE), acc, input_precision="ieee")
    return acc, total, peak


@triton.jit
def attend(
    query, position, cache, begin, open_from, open_to, end, lowest, window, factor, cap,
    HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr, COMPUTE: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, FOLDED: tl.constexpr,
    PHASED: tl.constexpr,
):  # fmt: skip
    """Attention of the queries [BLOCK_M, BLOCK_D] at these positions over keys begin..end-1, of which, if PHASED, all
    queries see open_from..open_to-1: (result float32 [BLOCK_M, BLOCK_D], log-sum-exp (base 2) of the scores)."""
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    peak = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    if PHASED:
        if WINDOWED:
            acc, total, peak = fold_keys(
                acc, total, peak, query, position, cache, begin, open_from, lowest, end, window, factor, cap,
                HEAD_SIZE, BLOCK_D, BLOCK_N, PAGE, COMPUTE, WINDOWED, CAPPED, FOLDED, True,
            )  # fmt: skip
        acc, total, peak = fold_keys(
            acc, total, peak, query, position, cache, open_from, open_to, lowest, end, window, factor, cap,
            HEAD_SIZE, BLOCK_D, BLOCK_N, PAGE, COMPUTE, WINDOWED, CAPPED, FOLDED, False,
        )  # fmt: skip
    acc, total, peak = fold_keys(
        acc, total, peak, query, position, cache, open_to, end, lowest, end, window, factor, cap,
        HEAD_SIZE, BLOCK_D, BLOCK_N, PAGE, COMPUTE, WINDOWED, CAPPED, FOLDED, True,
    )  # fmt: skip
    total = tl.where(total > 0.0, total, 1.0)  # a query that sees nothing: its result is 0, its peak -inf
    return acc / total[:, None], peak + tl.log2(total)
