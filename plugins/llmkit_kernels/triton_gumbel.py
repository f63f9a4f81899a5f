"""The noise of `llmkit.sampling.gumbel`, computed where it is used, and the first of the best."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

INTERPRETED: bool = triton.knobs.runtime.interpret

_LARGEST = tl.constexpr(1.0 - 2.0**-24)
_UNIT = tl.constexpr(2.0**-32)
_LN2 = tl.constexpr(0.6931471805599453)

MOST_NOISE = tl.constexpr(22.9)
"""No noise is larger: -log(2⁻³³)."""


@triton.jit
def gumbel(word, EXACT: tl.constexpr):
    """Random words → float32 -log(-log(1 - u)), u = (word + 1/2) / 2³²."""
    u = tl.minimum(word.to(tl.float32) * _UNIT + 0.5 * _UNIT, _LARGEST)
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
    u = tl.minimum(word.to(tl.float32) * _UNIT + 0.5 * _UNIT, _LARGEST)
    # Near 1 the fast logarithm is good to 2⁻²², which is too little of a small result.
    exponent = tl.where(u < 0.015625, u + 0.5 * u * u, -_rough_log(1.0 - u, EXACT))
    return -_rough_log(exponent, EXACT)


@triton.jit
def first_largest(value, index):
    """(largest value, lowest index that has it) of float32 [b], int32 [b]."""
    largest = tl.max(value, 0)
    return largest, tl.min(tl.where(value == largest, index, 2147483647), 0)
