"""Draws from what top-k, top-p and min-p leave of a row, without sorting it.

All three keep a prefix of the order "larger logit first, the lower index first among equals", so what is kept is a
value and how many of the entries that have it. A program takes a row: it copies what can be among the first to memory
of its own, in the order of indices, halves the values between which the cut must lie until one is left, and draws from
what lies before it. The sums are in float64, as in `llmkit.sampling.truncation`, and their order depends on the row
alone.

Where to look is bounded first. The k-th largest of the maxima of pieces of the row is at most the k-th largest entry.
Entries of less than (1 - p) / v times the best one's probability hold less than the 1 - p that top-p leaves out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from llmkit.jit.rehearsal import launch
from llmkit.sampling.device_draw import DeviceDraws
from llmkit_kernels.triton_gumbel import INTERPRETED, first_largest, gumbel

_BLOCK = 256 if INTERPRETED else 4096
_PIECE = 8 if INTERPRETED else 64
_LOWEST = tl.constexpr(-3.0e38)  # below every scaled logit that may be drawn
_HALVINGS = tl.constexpr(16)  # to bound a top-k: more would spare less than they cost


@triton.jit
def _weight(scaled, EXACT: tl.constexpr):
    """float32 → exp in float64."""
    if EXACT:
        return libdevice.exp(scaled.to(tl.float64))
    return tl.exp(scaled.to(tl.float64))


@triton.jit
def _scaled(logits_ptr, index, size, peak, temperature):
    logit = tl.load(logits_ptr + index, mask=index < size, other=float("-inf")).to(tl.float32)
    return tl.div_rn(logit - peak, temperature)


@triton.jit
def _least_of_first(logits_ptr, maxima_ptr, size, k, peak, temperature, BLOCK: tl.constexpr, PIECE: tl.constexpr):
    """A value that at least k scaled logits reach, and hardly more; k is at most the number of pieces."""
    pieces: tl.constexpr = BLOCK // PIECE
    for start in range(0, size, BLOCK):
        scaled = _scaled(logits_ptr, start + tl.arange(0, BLOCK), size, peak, temperature)
        place = start // PIECE + tl.arange(0, pieces)
        tl.store(maxima_ptr + place, tl.max(tl.reshape(scaled, (pieces, PIECE)), 1), mask=place * PIECE < size)
    tl.debug_barrier()
    number = tl.cdiv(size, PIECE)
    least = tl.full((), 0.0, tl.float32)
    for start in range(0, number, BLOCK):
        place = start + tl.arange(0, BLOCK)
        maxima = tl.load(maxima_ptr + place, mask=place < number, other=0.0)
        least = tl.minimum(least, tl.min(maxima, 0))
    low = tl.maximum(least, _LOWEST)
    high = tl.full((), 0.0, tl.float32)
    for _ in range(_HALVINGS):
        middle = low + (high - low) * 0.5
        count = 0
        for start in range(0, number, BLOCK):
            place = start + tl.arange(0, BLOCK)
            maxima = tl.load(maxima_ptr + place, mask=place < number, other=float("-inf"))
            count += tl.sum((maxima >= middle).to(tl.int32), 0)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count >= k, high, middle)
    tl.debug_barrier()
    return low


@triton.jit
def _gather(
    logits_ptr, kept_ptr, index_ptr, size, peak, temperature, floor, log_min_p, with_mass,
    BLOCK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Scaled logits from `floor` on and their indices, in order of these. (Their number, with_mass: the sum of the
    weights of all that min_p keeps)."""
    count = 0
    mass = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        scaled = _scaled(logits_ptr, index, size, peak, temperature)
        wanted = (scaled >= floor) & (index < size)
        place = count + tl.cumsum(wanted.to(tl.int32), 0) - 1
        tl.store(kept_ptr + place, scaled, mask=wanted)
        tl.store(index_ptr + place, index, mask=wanted)
        count += tl.sum(wanted.to(tl.int32), 0)
        if with_mass:
            mass += tl.where(scaled >= log_min_p, _weight(scaled, EXACT), 0.0)
    tl.debug_barrier()
    return count, tl.sum(mass, 0)


@triton.jit
def _measure(values, WEIGHED: tl.constexpr, EXACT: tl.constexpr):
    """float64: a weight each, or 1."""
    if WEIGHED:
        return _weight(values, EXACT)
    return tl.full(values.shape, 1.0, tl.float64)


@triton.jit
def _cut(
    kept_ptr, spare_ptr, size, count, floor, target, WEIGHED: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest of the values from `floor` on down to which they measure at least `target`, and what those above it
    measure. spare_ptr: room for twice `size` values."""
    source_ptr = kept_ptr
    target_ptr = spare_ptr
    low = tl.zeros((), tl.float32) + floor
    high = tl.zeros((), tl.float32)
    above = tl.zeros((), tl.float64)
    side = 0
    while (count > BLOCK) & (low < high):
        middle = low + (high - low) * 0.5
        middle = tl.where(middle > low, middle, high)
        reached = tl.zeros((BLOCK,), tl.float64)
        upper = tl.full((BLOCK,), float("inf"), tl.float32)
        lower = tl.full((BLOCK,), float("-inf"), tl.float32)
        front, back = 0, 0
        for start in range(0, count, BLOCK):
            place = start + tl.arange(0, BLOCK)
            value = tl.load(source_ptr + place, mask=place < count, other=float("-inf"))
            alive = (place < count) & (value >= low) & (value <= high)
            over = alive & (value >= middle)
            under = alive & (value < middle)
            reached += tl.where(over, _measure(value, WEIGHED, EXACT), 0.0)
            upper = tl.minimum(upper, tl.where(over, value, float("inf")))
            lower = tl.maximum(lower, tl.where(under, value, float("-inf")))
            tl.store(target_ptr + front + tl.cumsum(over.to(tl.int32), 0) - 1, value, mask=over)
            tl.store(target_ptr + count - back - tl.cumsum(under.to(tl.int32), 0), value, mask=under)
            front += tl.sum(over.to(tl.int32), 0)
            back += tl.sum(under.to(tl.int32), 0)
        tl.debug_barrier()
        total = above + tl.sum(reached, 0)
        enough = total >= target
        low = tl.where(enough, tl.min(upper, 0), low)
        high = tl.where(enough, high, tl.maximum(tl.max(lower, 0), low))
        above = tl.where(enough, above, total)
        source_ptr = target_ptr + tl.where(enough, 0, count - back)
        count = tl.where(enough, front, back)
        side = 1 - side
        target_ptr = spare_ptr + side * size
    place = tl.arange(0, BLOCK)
    value = tl.load(source_ptr + place, mask=place < tl.minimum(count, BLOCK), other=float("-inf"))
    measure = _measure(value, WEIGHED, EXACT)
    while low < high:
        middle = low + (high - low) * 0.5
        middle = tl.where(middle > low, middle, high)
        over = (value >= middle) & (value <= high)
        under = (value >= low) & (value < middle)
        total = above + tl.sum(tl.where(over, measure, 0.0), 0)
        enough = total >= target
        low = tl.where(enough, tl.min(tl.where(over, value, float("inf")), 0), low)
        high = tl.where(enough, high, tl.maximum(tl.max(tl.where(under, value, float("-inf")), 0), low))
        above = tl.where(enough, above, total)
    tl.debug_barrier()
    return low, above


@triton.jit
def _mass_above(kept_ptr, count, cut, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    mass = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.load(kept_ptr + place, mask=place < count, other=float("-inf"))
        mass += tl.where(value > cut, _weight(value, EXACT), 0.0)
    return tl.sum(mass, 0)


@triton.jit
def _drawn(kept_ptr, index_ptr, count, cut, equals, seed, position, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    """The entry with the best score among those above `cut` and the first `equals` that are equal to it."""
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    place_of = tl.full((BLOCK,), 2147483647, tl.int32)
    seen = 0
    zero = tl.zeros((BLOCK,), tl.uint32)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.load(kept_ptr + place, mask=place < count, other=float("-inf"))
        index = tl.load(index_ptr + place, mask=place < count, other=0)
        equal = ((place < count) & (value == cut)).to(tl.int32)
        wanted = (place < count) & ((value > cut) | ((equal > 0) & (seen + tl.cumsum(equal, 0) <= equals)))
        seen += tl.sum(equal, 0)
        words = tl.philox(seed, (index // 4).to(tl.uint32), zero + position.to(tl.uint32), zero, zero)
        lane = index % 4
        word = tl.where(lane == 0, words[0], tl.where(lane == 1, words[1], tl.where(lane == 2, words[2], words[3])))
        score = value + gumbel(word, EXACT)
        better = wanted & ((score > best) | ((score == best) & (index < place_of)))
        best = tl.where(better, score, best)
        place_of = tl.where(better, index, place_of)
    _, token = first_largest(best, place_of)
    return token


@triton.jit(do_not_specialize=["rows"])
def truncated_kernel(
    logits_ptr, peaks_ptr, tokens_ptr, seeds_ptr, positions_ptr, temperatures_ptr, min_p_ptr, top_k_ptr, top_p_ptr,
    values_ptr, indices_ptr, rows, row_stride, size, BLOCK: tl.constexpr, PIECE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """A program: row after row of those that are truncated. values [programs, 3, size], indices [programs, size]."""
    program = tl.program_id(0).to(tl.int64)
    kept_ptr = values_ptr + program * 3 * size
    spare_ptr = kept_ptr + size
    index_ptr = indices_ptr + program * size
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        temperature, peak = tl.load(temperatures_ptr + row), tl.load(peaks_ptr + row)
        k, p = tl.load(top_k_ptr + row).to(tl.int32), tl.load(top_p_ptr + row)
        if (temperature > 0) & ((k < size) | (p < 1)) & (peak - peak == 0):
            row_ptr = logits_ptr + tl.cast(row, tl.int64) * row_stride
            log_min_p = tl.load(min_p_ptr + row)
            floor = tl.maximum(log_min_p, _LOWEST)
            if k >= size:
                floor = tl.maximum(floor, tl.log(((1 - p) / size).to(tl.float32)) - 0.01)
            elif k <= tl.cdiv(size, PIECE):
                least = _least_of_first(row_ptr, spare_ptr, size, k, peak, temperature, BLOCK, PIECE)
                floor = tl.maximum(floor, least)
            count, mass = _gather(
                row_ptr, kept_ptr, index_ptr, size, peak, temperature, floor, log_min_p, k >= size, BLOCK, EXACT
            )
            cut, equals = floor, count
            if k < count:
                cut, above = _cut(kept_ptr, spare_ptr, size, count, floor, k.to(tl.float64), False, EXACT, BLOCK)
                equals = k - above.to(tl.int32)
            if p < 1:
                if k < count:
                    mass = _mass_above(kept_ptr, count, cut, BLOCK, EXACT) + equals * _weight(cut, EXACT)
                elif k < size:
                    mass = _mass_above(kept_ptr, count, float("-inf"), BLOCK, EXACT)
                share = p * mass
                least_kept, heavier = _cut(kept_ptr, spare_ptr, size, count, cut, share, True, EXACT, BLOCK)
                needed = tl.maximum(tl.ceil((share - heavier) / _weight(least_kept, EXACT)), 1.0)
                needed = tl.minimum(needed, count.to(tl.float64)).to(tl.int32)
                equals = tl.where(least_kept > cut, needed, tl.minimum(needed, equals))
                cut = least_kept
            seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
            token = _drawn(kept_ptr, index_ptr, count, cut, equals, seed, position, BLOCK, EXACT)
            tl.store(tokens_ptr + row, token.to(tl.int64))
            tl.debug_barrier()


def draw_truncated(logits: torch.Tensor, peaks: torch.Tensor, draws: DeviceDraws, tokens: torch.Tensor) -> None:
    """Put the tokens of truncated rows into `tokens` int64[n]. peaks float32[n]: the best logit of each row."""
    assert draws.truncation is not None
    rows, size = logits.shape
    programs = min(rows, _programs_at_once(logits.device))
    values = torch.empty((programs, 3, size), dtype=torch.float32, device=logits.device)
    indices = torch.empty((programs, size), dtype=torch.int32, device=logits.device)
    launch(
        truncated_kernel, (programs,),
        logits, peaks, tokens, draws.seeds, draws.positions, draws.temperatures, draws.log_min_p,
        draws.truncation.top_k, draws.truncation.top_p, values, indices, rows, logits.stride(0), size,
        BLOCK=_BLOCK, PIECE=_PIECE, EXACT=not INTERPRETED, num_warps=16,
    )  # fmt: skip


def _programs_at_once(device: torch.device) -> int:
    """One a multiprocessor: memory is needed for each. Interpreted, so few that each has several rows."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
