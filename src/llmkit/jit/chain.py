"""Kernels that start before the one ahead of them has ended ("programmatic dependent launch", Hopper and later).

A kernel launched with `launch_pdl` starts when all programs of the kernel ahead have called `next_may_start` or ended,
and must call `wait_for_last` in every program before it touches what other kernels write: then all kernels ahead have
ended, as they have waited too. Behind or ahead of other kernels it is launched as usual.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents as next_may_start
from triton.language.extra.cuda import gdc_wait as wait_for_last

INTERPRETED: bool = triton.knobs.runtime.interpret

LINE = tl.constexpr(128)
"""Bytes in a line of the cache that all multiprocessors share."""

__all__ = ["INTERPRETED", "LINE", "ask_for", "follows_early", "next_may_start", "wait_for_last"]


@triton.jit
def ask_for(cells):  # type: ignore[no-untyped-def]
    """Have the lines at these addresses [n, m] brought to the cache that all multiprocessors share: before the wait,
    for what no kernel writes."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [cells], dtype=tl.int32, is_pure=False, pack=1
    )


@functools.cache
def follows_early(device: torch.device) -> bool:
    """Whether kernels on `device` can be launched so."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
