"""Tokens from logits, without sorting and without writing probabilities or noise.

Three launches: the best logit of every part of a row; of what is left of each part after scaling, min_p and noise the
best score; the best of all parts. Rows with top-k or top-p take a fourth, `triton_truncate.py`. The noise is that of
`llmkit.sampling.gumbel`: the same bits of Philox, computed where they are used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmkit.jit.rehearsal import launch
from llmkit.sampling.device_draw import NOT_FINITE, DeviceDraws
from llmkit_kernels.triton_gumbel import INTERPRETED, MOST_NOISE, first_largest, gumbel, rough_gumbel
from llmkit_kernels.triton_truncate import draw_truncated

_BLOCK = 1024  # counters, four entries each
_MOST_PARTS = 64
_NOT_FINITE = tl.constexpr(NOT_FINITE)
_MARGIN = tl.constexpr(0.01)  # above the error of rough scores that could be the best


@triton.jit
def best_kernel(logits_ptr, value_ptr, index_ptr, row_stride, size, span, BLOCK: tl.constexpr):
    """One program: of one part of a row the best logit, NaN if there is one, and its first place."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = tl.full((BLOCK,), 2147483647, tl.int32)
    spoilt = tl.zeros((BLOCK,), tl.int32)
    for start in range(part * span, min((part + 1) * span, size), BLOCK):
        index = start + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + row * row_stride + index, mask=index < size, other=float("-inf")).to(tl.float32)
        spoilt |= (logit != logit).to(tl.int32)
        better = logit > best
        best = tl.where(better, logit, best)
        place = tl.where(better, index, place)
    value, index = first_largest(best, place)
    value = tl.where(tl.max(spoilt, 0) > 0, float("nan"), value)
    tl.store(value_ptr + row * tl.num_programs(1) + part, value)
    tl.store(index_ptr + row * tl.num_programs(1) + part, index)


@triton.jit
def _row_best(value_ptr, row, parts, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    values = tl.load(value_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
    spoilt = tl.max((values != values).to(tl.int32), 0) > 0
    return tl.where(spoilt, float("nan"), tl.max(values, 0))


@triton.jit
def _lane(row_ptr, index, size):
    return tl.load(row_ptr + index, mask=index < size, other=float("-inf")).to(tl.float32)


@triton.jit
def _rough(part, lane: tl.constexpr, word, EXACT: tl.constexpr):
    """Of one lane's entries of a part: (scores about as they are, those of them that certainly may be drawn)."""
    row_ptr, index, size, peak, inverse, log_min_p = part
    scaled = (_lane(row_ptr, index + lane, size) - peak) * inverse
    rough = scaled + rough_gumbel(word, EXACT)
    return rough, tl.where(scaled >= log_min_p + _MARGIN, rough, float("-inf"))


@triton.jit
def _bit(rough, bound, bit: tl.constexpr):
    """`bit` where a score could be the best, or is no number."""
    return tl.where(rough < bound, 0, bit)


@triton.jit
def _both(one, other):
    return one | other


@triton.jit
def score_kernel(
    logits_ptr, best_ptr, value_ptr, index_ptr, seeds_ptr, positions_ptr, temperatures_ptr, min_p_ptr,
    row_stride, size, span, BLOCK: tl.constexpr, PARTS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One program: of one part of a row that draws, the best score and its first place."""
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature = tl.load(temperatures_ptr + row)
    if temperature > 0:
        peak = _row_best(best_ptr, row, parts, PARTS)
        log_min_p = tl.load(min_p_ptr + row)
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        place = tl.full((BLOCK,), 2147483647, tl.int32)
        row_ptr = logits_ptr + row * row_stride
        inverse = 1.0 / temperature
        for start in range(part * span, min((part + 1) * span, size), 4 * BLOCK):
            counter = start // 4 + tl.arange(0, BLOCK)
            # Most blocks hold nothing that could be the best, which cheap arithmetic shows. The best logit's scaled
            # value is 0 and its noise more than -2.9: whatever is rounded away of values below -26 does not matter.
            bound = tl.max(best, 0) - _MARGIN
            highest = tl.full((BLOCK,), float("-inf"), tl.float32)
            for lane in tl.static_range(4):
                highest = tl.maximum(highest, _lane(row_ptr, counter * 4 + lane, size))
            if not ((tl.max(highest, 0) - peak) * inverse + MOST_NOISE < bound):
                zero = tl.zeros((BLOCK,), tl.uint32)
                words = tl.philox(seed, counter.to(tl.uint32), zero + position.to(tl.uint32), zero, zero)
                # What certainly may be drawn bounds the others, those of this block too.
                part_of = (row_ptr, counter * 4, size, peak, inverse, log_min_p)
                rough0, sure0 = _rough(part_of, 0, words[0], EXACT)
                rough1, sure1 = _rough(part_of, 1, words[1], EXACT)
                rough2, sure2 = _rough(part_of, 2, words[2], EXACT)
                rough3, sure3 = _rough(part_of, 3, words[3], EXACT)
                sure = tl.maximum(tl.maximum(sure0, sure1), tl.maximum(sure2, sure3))
                bound = tl.maximum(bound, tl.max(sure, 0) - _MARGIN)
                near = _bit(rough0, bound, 1) | _bit(rough1, bound, 2) | _bit(rough2, bound, 4) | _bit(rough3, bound, 8)
                lanes = tl.reduce(near, 0, _both)
                for lane in tl.static_range(4):
                    if (lanes >> lane) & 1 > 0:
                        index = counter * 4 + lane
                        scaled = tl.div_rn(_lane(row_ptr, index, size) - peak, temperature)
                        score = scaled + gumbel(words[lane], EXACT)
                        better = (score > best) | ((score == best) & (index < place))
                        better = (index < size) & (scaled >= log_min_p) & better
                        best = tl.where(better, score, best)
                        place = tl.where(better, index, place)
        value, index = first_largest(best, place)
        tl.store(value_ptr + row * parts + part, value)
        tl.store(index_ptr + row * parts + part, index)


@triton.jit(do_not_specialize=["parts"])
def choose_kernel(
    best_ptr, best_index_ptr, score_ptr, score_index_ptr, temperatures_ptr, tokens_ptr, peaks_ptr, parts,
    PARTS: tl.constexpr,
):  # fmt: skip
    """One program: a row's token, or NOT_FINITE, and its best logit."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    there = part < parts
    peak = _row_best(best_ptr, row, parts, PARTS)
    if tl.load(temperatures_ptr + row) > 0:
        value_ptr, index_ptr = score_ptr, score_index_ptr
    else:
        value_ptr, index_ptr = best_ptr, best_index_ptr
    values = tl.load(value_ptr + row * parts + part, mask=there, other=float("-inf"))
    indices = tl.load(index_ptr + row * parts + part, mask=there, other=2147483647)
    _, token = first_largest(values, indices)
    finite = (peak == peak) & (tl.abs(peak) < float("inf"))
    tl.store(tokens_ptr + row, tl.where(finite, token, _NOT_FINITE).to(tl.int64))
    tl.store(peaks_ptr + row, peak)


def draw(logits: torch.Tensor, draws: DeviceDraws) -> torch.Tensor:
    """See `llmkit.sampling.device_draw.draw_or_best`; logits [n, v], rows dense."""
    rows, size = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return tokens
    # So many parts that a few rows fill a GPU; many rows do so by themselves.
    parts = max(1, min(_MOST_PARTS, 512 // rows, triton.cdiv(size, 4 * _BLOCK)))
    span = triton.cdiv(triton.cdiv(size, parts), 4 * _BLOCK) * 4 * _BLOCK
    parts = triton.cdiv(size, span)
    peaks = torch.empty(rows, dtype=torch.float32, device=logits.device)
    # Each at an aligned address of its own, whatever the number of rows: Triton compiles a kernel for every alignment.
    best, score = (torch.empty((rows, parts), dtype=torch.float32, device=logits.device) for _ in range(2))
    best_at, score_at = (torch.empty((rows, parts), dtype=torch.int32, device=logits.device) for _ in range(2))
    launch(
        best_kernel, (rows, parts), logits, best, best_at, logits.stride(0), size, span, BLOCK=4 * _BLOCK, num_warps=8
    )
    drawn_whole = draws.temperatures
    if draws.truncation is not None:
        drawn_whole = torch.where(draws.truncation.of_rows(size), 0.0, draws.temperatures)
    launch(
        score_kernel, (rows, parts),
        logits, best, score, score_at, draws.seeds, draws.positions, drawn_whole, draws.log_min_p,
        logits.stride(0), size, span, BLOCK=_BLOCK, PARTS=_MOST_PARTS, EXACT=not INTERPRETED, num_warps=8,
    )  # fmt: skip
    launch(
        choose_kernel,
        (rows,),
        best,
        best_at,
        score,
        score_at,
        drawn_whole,
        tokens,
        peaks,
        parts,
        PARTS=_MOST_PARTS,
        num_warps=1,
    )
    if draws.truncation is not None:
        draw_truncated(logits, peaks, draws, tokens)
    return tokens
