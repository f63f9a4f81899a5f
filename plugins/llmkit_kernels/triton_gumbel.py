"""The noise of `llmkit.sampling.gumbel`, computed where it is used, and the first of the best."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

INTERPRETED: bool = triton.knobs.runtime.interpret

_LARGEST = tl.constexpr(1.0 - 2.0**-24)
UNIT = tl.constexpr(2.0**-32)
"""What a random word counts."""

_LN2 = tl.constexpr(0.6931471805599453)

MOST_NOISE = tl.constexpr(22.9)
"""No noise is larger: -log(2⁻³³)."""


@triton.jit
def philox(seed, counter, position):
    """The four words of philox4x32-10 for counters (counter, position, 0, 0), uint32, and key `seed`, int64. As
    `tl.philox`, with one product in 64 bits for the two that give its halves."""
    key0, key1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = counter, tl.zeros_like(counter) + position
    c2 = tl.zeros_like(counter)
    c3 = c2
    for _ in tl.static_range(10):
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ key0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ key1
        c1, c3 = product1.to(tl.uint32), product0.to(tl.uint32)
        key0 = (key0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        key1 = (key1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def word_of(words, lane):
    """Of four words that of each entry's lane."""
    return tl.where(lane == 0, words[0], tl.where(lane == 1, words[1], tl.where(lane == 2, words[2], words[3])))


@triton.jit
def gumbel(word, EXACT: tl.constexpr):
    """Random words → float32 -log(-log(1 - u)), u = (word + 1/2) / 2³²."""
    u = tl.minimum(word.to(tl.float32) * UNIT + 0.5 * UNIT, _LARGEST)
    if EXACT:
        return -libdevice.log(-libdevice.log1p(-u))
    # The interpreter has no log1p: 1 - u is exact in float64.
    return -tl.log(-tl.log(1.0 - u.to(tl.float64))).to(tl.float32)


@triton.jit
def _rough_log(x, EXACT: tl.constexpr):
    if EXACT:
        return _LN2 * libdevice.fast_log2f(x)
    return tl.log(x)


@triton.jit
def rough_gumbel(word, EXACT: tl.constexpr):
    """`gumbel` with an error below 0.001, in less time."""
    u = tl.minimum(word.to(tl.float32) * UNIT + 0.5 * UNIT, _LARGEST)
    # Near 1 the fast logarithm is good to 2⁻²², which is too little of a small result.
    exponent = tl.where(u < 0.015625, u + 0.5 * u * u, -_rough_log(1.0 - u, EXACT))
    return -_rough_log(exponent, EXACT)


@triton.jit
def first_largest(value, index):
    """(largest value, lowest index that has it) of float32 [b], int32 [b]."""
    largest = tl.max(value, 0)
    return largest, tl.min(tl.where(value == largest, index, 2147483647), 0)
