"""Weight-only int8 for CPUs: groups of 32 along k, weight = scale * code with codes -127..127.

A group of a row is 32 codes and a float16 scale: 8.5 bits a weight, the precision of GGUF's Q8_0; quantizing a
dequantized Q8_0 weight gives its codes and scales back. Meant for embeddings tied to the last layer, and for linear
layers. The error of int8 itself is, for normal random weights, about 5e-3.

A block of `cpu_coded` is, for each eighth of a group, a word of 4 bytes of each of the panel's rows, which has codes
0, 2, 1, 3 of the eighth in this order; then the scales.
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
BLOCK = cpu_coded.BLOCK_BYTES[8]
OUTER = 0xFF0000FF  # bytes of a word that keep their place
LANES = 8  # set by load(), a constant of the compiled code
_kernels: dict[str, Any] = {}


def _quantize_kernel(args: Any) -> None:
    """args: tickets, weight, panels, n, groups, scratch, its bytes a thread, tickets; the weight's rows are
    groups * 32 long. An item is a panel."""
    weight, panels, n, groups = args[1], args[2], args[3], args[4]
    codes = args[5] + args[6] * ops.take(args, 7)
    zero, limit = ops.vsplat(0.0), ops.vsplat(127.0)
    lowest = ops.vsub(zero, limit)
    while True:
        start = ops.take(args, 0) * ROWS
        if start >= n:
            break
        for row in range(start, min(start + ROWS, n)):
            lane = row - start
            for g in range(groups):
                source, block = weight + 4 * GROUP * (row * groups + g), panels + BLOCK * (start // ROWS * groups + g)
                size = zero
                for i in range(0, GROUP, LANES):
                    value = ops.vload(source + 4 * i)
                    size = ops.vmax(size, ops.vmax(value, ops.vsub(zero, value)))
                # Codes are found with the rounded scale, the one that decoding will use.
                ops.hstore(block + 32 * ROWS + 2 * lane, ops.vtop(size) / 127)
                scale = ops.hload(block + 32 * ROWS + 2 * lane)
                inverse = ops.vsplat(1 / scale if scale > 0 else 0.0)
                for i in range(0, GROUP, LANES):
                    code = ops.vround(ops.vmul(ops.vload(source + 4 * i), inverse))
                    ops.vstore_int8(codes + i, ops.vmax(ops.vmin(code, limit), lowest))
                for eighth in range(8):
                    word = ops.iload(codes + 4 * eighth)
                    swapped = (word & OUTER) | ((word >> 8) & 0xFF00) | ((word & 0xFF00) << 8)
                    ops.istore(block + 4 * (eighth * ROWS + lane), swapped)


def load() -> dict[str, Any]:
    """Compile or load the kernel of this module, and those that multiply."""
    global LANES
    if not _kernels:
        cpu_packed.load()
        LANES = ops.LANES
        _kernels["quantize"] = runtime.compile_kernel(_quantize_kernel, (cpu_coded,))
    return _kernels


def quantize(weight: torch.Tensor, memory: MappedMemory) -> cpu_packed.Packed:
    """Quantize a weight [n, k] of any float dtype. Values must be finite and below 8e6 in size."""
    n, k = weight.shape
    groups = -(-k // GROUP)
    source = weight.detach().float()
    if k % GROUP:
        source = torch.nn.functional.pad(source, (0, groups * GROUP - k))
    source = source.contiguous()
    kernel, threads = load()["quantize"], torch.get_num_threads()
    panels = cpu_coded.empty_panels(n, groups, 8, memory)
    scratch = runtime.scratch_address(64 * threads)
    runtime.launch(kernel, threads, source.data_ptr(), panels.data_ptr(), n, groups, scratch, 64, 0)
    return cpu_packed.Packed(panels, (n, k), 8)
