"""Tokens from logits, without sorting and without writing probabilities or noise.

Three launches: the best logit of every piece of a row; of each part's pieces the best score after scaling, min_p and
noise; the best of all parts. Rows with top-k or top-p take a fourth, `triton_truncate.py`. The noise is that of
`llmkit.sampling.gumbel`: the same bits of Philox, computed where they are used.

Most entries are told to lose by a comparison of their random word: noise above a bound means a word below one, so that
neither logarithm is computed. The first bound comes from the best entries of all pieces, with the noise that they have.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmkit.jit.chain import follows_early, next_may_start, wait_for_last
from llmkit.jit.rehearsal import launch
from llmkit.sampling.device_draw import NOT_FINITE, DeviceDraws
from llmkit_kernels.triton_gumbel import (
    INTERPRETED,
    MOST_NOISE,
    UNIT,
    first_largest,
    gumbel,
    philox,
    rough_gumbel,
    word_of,
)
from llmkit_kernels.triton_truncate import draw_truncated

_BLOCK = 128 if INTERPRETED else 1024  # counters, four entries each
_MOST_PIECES = 128
_MOST_PARTS = 64
_PROGRAMS = 528  # that a GPU is filled with
_WARPS = 4
_NOT_FINITE = tl.constexpr(NOT_FINITE)
_MARGIN = tl.constexpr(0.01)  # above the error of rough scores that could be the best
_ROUNDED = tl.constexpr(1.0 + 1e-6)  # above the relative error of what is scaled with the temperature's inverse
_LOG2E = tl.constexpr(1.4426950408889634)
_NOWHERE = tl.constexpr(2147483647)


@triton.jit
def _larger(one, other):
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def best_kernel(
    logits_ptr, value_ptr, index_ptr, row_stride, size, span, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """One program: of one piece of a row the best logit, NaN if there is one, and its first place."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if EARLY:
        next_may_start()
        wait_for_last()
    value, place = tl.full((), float("-inf"), tl.float32), tl.full((), _NOWHERE, tl.int32)
    for start in range(piece * span, min((piece + 1) * span, size), BLOCK):
        index = start + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + row * row_stride + index, mask=index < size, other=float("-inf")).to(tl.float32)
        best = tl.reduce(logit, 0, _larger)
        at = tl.min(tl.where(logit == best, index, _NOWHERE), 0)
        place = tl.where((place == _NOWHERE) | (best > value), at, place)
        value = tl.maximum(value, best, propagate_nan=tl.PropagateNan.ALL)
    tl.store(value_ptr + row * tl.num_programs(1) + piece, value)
    tl.store(index_ptr + row * tl.num_programs(1) + piece, place)


@triton.jit
def _is_finite(value):
    return tl.abs(value) < float("inf")


@triton.jit
def _lane_scores(row_ptr, index, size, of_row, word, EXACT: tl.constexpr):
    """Scores of entries about as they are, -inf where nothing may be drawn."""
    peak, inverse, log_min_p = of_row
    scaled = (tl.load(row_ptr + index, mask=index < size, other=float("-inf")).to(tl.float32) - peak) * inverse
    return tl.where(scaled >= log_min_p * _ROUNDED, scaled + rough_gumbel(word, EXACT), float("-inf"))


@triton.jit
def _highest(scores):
    return tl.max(tl.maximum(tl.maximum(scores[0], scores[1]), tl.maximum(scores[2], scores[3])), 0)


@triton.jit
def _first_at(scores, index, value):
    """The first entry with that score."""
    first = tl.where(scores[0] == value, index, _NOWHERE)
    for lane in tl.static_range(1, 4):
        first = tl.minimum(first, tl.where(scores[lane] == value, index + lane, _NOWHERE))
    return tl.min(first, 0)


@triton.jit
def _without(scores, index, entry, lane: tl.constexpr):
    return tl.where(index + lane == entry, float("-inf"), scores[lane])


@triton.jit
def _best_of_block(
    row_ptr, start, size, of_row, temperature, noise, words, found, BLOCK: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """What is `found`, (bound, best, place), with a block in which an entry may be better."""
    peak, _, log_min_p = of_row
    seed, position = noise
    bound, best, place = found
    index = start + 4 * tl.arange(0, BLOCK)
    score0 = _lane_scores(row_ptr, index, size, of_row, words[0], EXACT)
    score1 = _lane_scores(row_ptr, index + 1, size, of_row, words[1], EXACT)
    score2 = _lane_scores(row_ptr, index + 2, size, of_row, words[2], EXACT)
    score3 = _lane_scores(row_ptr, index + 3, size, of_row, words[3], EXACT)
    scores = (score0, score1, score2, score3)
    highest = _highest(scores)
    while highest >= bound:  # hardly ever more than once
        entry = _first_at(scores, index, highest)
        scaled = tl.div_rn(tl.load(row_ptr + entry).to(tl.float32) - peak, temperature)
        word = word_of(philox(seed, (entry // 4).to(tl.uint32), position), entry % 4)
        score = tl.where(scaled >= log_min_p, scaled + gumbel(word, EXACT), float("-inf"))
        place = tl.where((score > best) | ((score == best) & (entry < place)), entry, place)
        best = tl.maximum(best, score)
        bound = tl.maximum(bound, score - _MARGIN)
        scores = (
            _without(scores, index, entry, 0), _without(scores, index, entry, 1),
            _without(scores, index, entry, 2), _without(scores, index, entry, 3),
        )  # fmt: skip
        highest = _highest(scores)
    return bound, best, place


@triton.jit(do_not_specialize=["per_part"])
def score_kernel(
    logits_ptr, best_ptr, best_at_ptr, value_ptr, index_ptr, seeds_ptr, positions_ptr, temperatures_ptr, min_p_ptr,
    row_stride, size, pieces, per_part,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, PIECES: tl.constexpr, EXACT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: of one part of a row that draws, the best score and its first place."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if EARLY:
        next_may_start()
        wait_for_last()
    temperature = tl.load(temperatures_ptr + row)
    piece = tl.arange(0, PIECES)
    tops = tl.load(best_ptr + row * pieces + piece, mask=piece < pieces, other=float("-inf"))
    peak = tl.reduce(tops, 0, _larger)
    if (temperature > 0) & _is_finite(peak):
        log_min_p = tl.load(min_p_ptr + row)
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row).to(tl.uint32)
        row_ptr = logits_ptr + row * row_stride
        inverse = tl.minimum(1.0 / temperature, 3.0e38)
        of_row, noise = (peak, inverse, log_min_p), (seed, position)
        at = tl.load(best_at_ptr + row * pieces + piece, mask=piece < pieces, other=0)
        word = word_of(philox(seed, (at // 4).to(tl.uint32), position), at % 4)
        scaled = tl.div_rn(tops - peak, temperature)
        # The best logit's scaled value is 0 and its noise more than -3.2: whatever is rounded away of values below -27
        # does not matter.
        bound = tl.max(tl.where(scaled >= log_min_p, scaled + rough_gumbel(word, EXACT), float("-inf")), 0) - _MARGIN
        best, place = tl.full((), float("-inf"), tl.float32), tl.full((), _NOWHERE, tl.int32)
        for start in range(part * per_part, min((part + 1) * per_part, size), 4 * BLOCK):
            top = tl.load(best_ptr + row * pieces + start // SPAN)
            if not ((top - peak) * inverse + MOST_NOISE < bound):
                counter = start // 4 + tl.arange(0, BLOCK)
                index = 4 * counter[:, None] + tl.arange(0, 4)[None, :]
                logit = tl.load(row_ptr + index, mask=index < size, other=float("-inf")).to(tl.float32)
                words = philox(seed, counter.to(tl.uint32), position)
                # -log(-log(1 - u)) > x only if u < exp(-x).
                room = tl.exp2(((tl.max(logit, 1) - peak) * inverse - bound) * _LOG2E)
                least = tl.minimum(tl.minimum(words[0], words[1]), tl.minimum(words[2], words[3]))
                if tl.max((least.to(tl.float32) * UNIT <= room).to(tl.int32), 0) > 0:
                    found = (bound, best, place)
                    bound, best, place = _best_of_block(
                        row_ptr, start, size, of_row, temperature, noise, words, found, BLOCK, EXACT
                    )
        tl.store(value_ptr + row * tl.num_programs(1) + part, best)
        tl.store(index_ptr + row * tl.num_programs(1) + part, place)


@triton.jit(do_not_specialize=["parts"])
def choose_kernel(
    best_ptr, best_index_ptr, score_ptr, score_index_ptr, temperatures_ptr, tokens_ptr, peaks_ptr, slots_ptr, last_ptr,
    pieces, parts, PIECES: tl.constexpr, PARTS: tl.constexpr, NOTED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: a row's token, or NOT_FINITE, and its best logit. NOTED: last[slots[row]] becomes the token, 0 for
    NOT_FINITE."""
    if EARLY:
        wait_for_last()
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES)
    values = tl.load(best_ptr + row * pieces + piece, mask=piece < pieces, other=float("-inf"))
    indices = tl.load(best_index_ptr + row * pieces + piece, mask=piece < pieces, other=_NOWHERE)
    peak = tl.reduce(values, 0, _larger)
    token = tl.min(tl.where(values == peak, indices, _NOWHERE), 0)
    finite = _is_finite(peak)
    if (tl.load(temperatures_ptr + row) > 0) & finite:
        part = tl.arange(0, PARTS)
        scores = tl.load(score_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
        places = tl.load(score_index_ptr + row * parts + part, mask=part < parts, other=_NOWHERE)
        _, token = first_largest(scores, places)
    token = tl.where(finite, token, _NOT_FINITE).to(tl.int64)
    tl.store(tokens_ptr + row, token)
    tl.store(peaks_ptr + row, peak)
    if NOTED:
        tl.store(last_ptr + tl.load(slots_ptr + row), tl.maximum(token, 0))


def draw(logits: torch.Tensor, draws: DeviceDraws) -> torch.Tensor:
    """See `llmkit.sampling.device_draw.draw_or_best`; logits [n, v], rows dense."""
    rows, size = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return tokens
    block = 4 * _BLOCK
    span = triton.cdiv(size, block * _MOST_PIECES) * block
    pieces = triton.cdiv(size, span)
    # So many parts that a few rows fill a GPU; many rows do so by themselves.
    parts = max(1, min(_MOST_PARTS, _PROGRAMS // rows, triton.cdiv(size, block)))
    per_part = triton.cdiv(triton.cdiv(size, block), parts) * block
    parts = triton.cdiv(size, per_part)
    peaks = torch.empty(rows, dtype=torch.float32, device=logits.device)
    # Each at an aligned address of its own, whatever the number of rows: Triton compiles a kernel for every alignment.
    best, score = (torch.empty((rows, n), dtype=torch.float32, device=logits.device) for n in (pieces, parts))
    best_at, score_at = (torch.empty((rows, n), dtype=torch.int32, device=logits.device) for n in (pieces, parts))
    drawn_whole = draws.temperatures
    if draws.truncation is not None:
        drawn_whole = torch.where(draws.truncation.of_rows(size), 0.0, draws.temperatures)
    early = follows_early(logits.device)
    options = {"launch_pdl": True} if early else {}
    launch(
        best_kernel, (rows, pieces), logits, best, best_at, logits.stride(0), size, span,
        BLOCK=block, EARLY=early, num_warps=8, **options,
    )  # fmt: skip
    launch(
        score_kernel, (rows, parts),
        logits, best, best_at, score, score_at, draws.seeds, draws.positions, drawn_whole, draws.log_min_p,
        logits.stride(0), size, pieces, per_part,
        BLOCK=_BLOCK, SPAN=span, PIECES=_MOST_PIECES, EXACT=not INTERPRETED, EARLY=early, num_warps=_WARPS, **options,
    )  # fmt: skip
    noted = draws.last_tokens
    slots, by_slot = (tokens, tokens) if noted is None else (noted.slots, noted.by_slot)
    launch(
        choose_kernel, (rows,),
        best, best_at, score, score_at, drawn_whole, tokens, peaks, slots, by_slot, pieces, parts,
        PIECES=_MOST_PIECES, PARTS=_MOST_PARTS, NOTED=noted is not None, EARLY=early, num_warps=1, **options,
    )  # fmt: skip
    if draws.truncation is not None:
        draw_truncated(logits, peaks, draws, tokens)
        if noted is not None:
            noted.note(tokens)
    return tokens
