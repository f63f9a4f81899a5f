"""Weight-only int4 for CPUs: groups of 32 along k, weight = scale * code + minimum.

A group of a row is 32 codes of 4 bits, a float16 scale and a float16 minimum: 5 bits a weight, the precision of GGUF's
Q4_1. A group whose values are already on a grid of at most 16 steps, as those of a dequantized Q4_0 or Q4_1 weight are,
keeps that grid: its values come back up to the rounding of scale and minimum to float16. The error of int4 itself is,
for normal random weights, about 8e-2.

A block of `cpu_coded` is, for each quarter of a group, a word of 4 bytes of each of the panel's rows, which has codes
0, 2, 4, 6 of the quarter in its low 16 bits and 1, 3, 5, 7 in its high ones; then the scales, then the minima.
"""

from __future__ import annotations

from typing import Any

import torch

from llmkit.jit import runtime
from llmkit.jit import vector as ops
from llmkit.mapped_memory import MappedMemory
from llmkit_quantization import cpu_coded, cpu_packed
from llmkit_quantization.cpu_coded import GROUP

ROWS = cpu_coded.ROWS
BLOCK = cpu_coded.BLOCK_BYTES[4]
EVEN = 0x00FF00FF00FF00FF  # bytes
ON_GRID = 1e-3  # steps by which a value on a grid may miss it: float32's rounding makes some 1e-6 of that
LANES = 8  # set by load(), as everything below; constants of the compiled code
num_steps: Any = None
_kernels: dict[str, Any] = {}


def _num_steps(source: int, least: float, most: float) -> int:
    """Of the grids of 15, 14, ... steps from the least to the greatest value of a group, the first that has all its
    values on it; 15 if none has."""
    if not most > least:
        return 15
    for steps in range(15, 0, -1):
        inverse, minimum = ops.vsplat(steps / (most - least)), ops.vsplat(least)
        i = 0
        while i < GROUP:
            place = ops.vmul(ops.vsub(ops.vload(source + 4 * i), minimum), inverse)
            off = ops.vsub(place, ops.vround(place))
            if not max(ops.vtop(off), -ops.vbottom(off)) < ON_GRID:
                break
            i += LANES
        if i >= GROUP:
            return steps
    return 15


def _quantize_kernel(args: Any) -> None:
    """args: tickets, weight, panels, n, groups, scratch, its bytes a thread, tickets; the weight's rows are
    groups * 32 long. An item is a panel."""
    weight, panels, n, groups = args[1], args[2], args[3], args[4]
    codes = args[5] + args[6] * ops.take(args, 7)
    while True:
        start = ops.take(args, 0) * ROWS
        if start >= n:
            break
        for row in range(start, min(start + ROWS, n)):
            lane = row - start
            for g in range(groups):
                source, block = weight + 4 * GROUP * (row * groups + g), panels + BLOCK * (start // ROWS * groups + g)
                low = high = ops.vload(source)
                for i in range(LANES, GROUP, LANES):
                    value = ops.vload(source + 4 * i)
                    low, high = ops.vmin(low, value), ops.vmax(high, value)
                least, place = ops.vbottom(low), block + 16 * ROWS + 2 * lane
                # Codes are found with the rounded scale and minimum, those that decoding will use.
                ops.hstore(place, (ops.vtop(high) - least) / num_steps(source, least, ops.vtop(high)))
                ops.hstore(place + 2 * ROWS, least)
                scale, minimum = ops.hload(place), ops.vsplat(ops.hload(place + 2 * ROWS))
                inverse = ops.vsplat(1 / scale if scale > 0 else 0.0)
                for i in range(0, GROUP, LANES):
                    code = ops.vround(ops.vmul(ops.vsub(ops.vload(source + 4 * i), minimum), inverse))
                    ops.vstore_int8(codes + i, ops.vmin(ops.vmax(code, ops.vsplat(0.0)), ops.vsplat(15.0)))
                for quarter in range(4):
                    both = ops.iload64(codes + 8 * quarter)
                    even, odd = both & EVEN, (both >> 8) & EVEN
                    even = (even | (even >> 12) | (even >> 24) | (even >> 36)) & 0xFFFF
                    odd = (odd | (odd >> 12) | (odd >> 24) | (odd >> 36)) & 0xFFFF
                    ops.istore(block + 4 * (quarter * ROWS + lane), even | (odd << 16))


def load() -> dict[str, Any]:
    """Compile or load the kernel of this module, and those that multiply."""
    global LANES, num_steps
    if not _kernels:
        cpu_packed.load()
        LANES = ops.LANES
        num_steps = runtime.inner(_num_steps)
        _kernels["quantize"] = runtime.compile_kernel(_quantize_kernel, (cpu_coded,))
    return _kernels


def quantize(weight: torch.Tensor, memory: MappedMemory) -> cpu_packed.Packed:
    """Quantize a weight [n, k] of any float dtype. Values must be finite and below 65504 in size."""
    n, k = weight.shape
    groups = -(-k // GROUP)
    source = weight.detach().float()
    if k % GROUP:
        # Repeat the last column: padding must not widen the range of the last group.
        source = torch.cat((source, source[:, -1:].expand(n, groups * GROUP - k)), 1)
    source = source.contiguous()
    kernel, threads = load()["quantize"], torch.get_num_threads()
    panels = cpu_coded.empty_panels(n, groups, 4, memory)
    scratch = runtime.scratch_address(64 * threads)
    runtime.launch(kernel, threads, source.data_ptr(), panels.data_ptr(), n, groups, scratch, 64, 0)
    return cpu_packed.Packed(panels, (n, k), 4)
