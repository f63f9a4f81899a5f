"""Weights as int4 or int8 codes in panels (`cpu_coded`): products with them, rows of them, the weight again.

Any n and k: k is padded to a multiple of 32 inside.

Products: the relative error against float64 with the dequantized weight is below 4e-5, most of it from rounding x to 16
bits a group; a row's product does not depend on the rows beside it, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from llmkit.jit import runtime
from llmkit.jit import vector as ops
from llmkit_quantization import cpu_coded
from llmkit_quantization.cpu_coded import GROUP

ROWS = cpu_coded.ROWS
BLOCK_4, BLOCK_8 = cpu_coded.BLOCK_BYTES[4], cpu_coded.BLOCK_BYTES[8]
PIECE = 4  # rows that a thread decodes at a time
_kernels: dict[str, Any] = {}


@dataclass(frozen=True)
class Packed:
    """A weight [n, k] of codes of 4 or 8 bits: uint8 [panels, groups, bytes of a block]."""

    panels: torch.Tensor
    shape: tuple[int, int]
    bits: int

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and minima."""
        return self.panels.nbytes


def packed_bytes(n: int, k: int, bits: int) -> int:
    """`Packed.nbytes` of a weight [n, k]."""
    return -(-n // ROWS) * -(-k // GROUP) * cpu_coded.BLOCK_BYTES[bits]


def _decode_kernel(args: Any) -> None:
    """args: tickets, bits, panels, target, ids (0: all rows in order), n, groups. Element by element: what is looked up
    are a few rows of an embedding."""
    bits, panels, target, ids, n, groups = args[1], args[2], args[3], args[4], args[5], args[6]
    block = BLOCK_4 if bits == 4 else BLOCK_8
    while True:
        start = ops.take(args, 0) * PIECE
        if start >= n:
            break
        for j in range(start, min(start + PIECE, n)):
            row = j if ids == 0 else ops.iload64(ids + 8 * j)
            lane = row & (ROWS - 1)
            for g in range(groups):
                place, out = panels + block * (row // ROWS * groups + g), target + 4 * GROUP * (j * groups + g)
                if bits == 4:
                    scale, minimum = ops.hload(place + 16 * ROWS + 2 * lane), ops.hload(place + 18 * ROWS + 2 * lane)
                    for i in range(GROUP):
                        word = ops.iload(place + 4 * ((i >> 3) * ROWS + lane))
                        code = (word >> (4 * ((i & 7) >> 1) + 16 * (i & 1))) & 15
                        ops.sstore(out + 4 * i, code * scale + minimum)
                else:
                    scale = ops.hload(place + 32 * ROWS + 2 * lane)
                    for i in range(GROUP):
                        word = ops.iload(place + 4 * ((i >> 2) * ROWS + lane))
                        code = (word << (56 - 8 * ((i & 3) >> 1) - 16 * (i & 1))) >> 56
                        ops.sstore(out + 4 * i, code * scale)


def load() -> dict[str, Any]:
    """Compile or load the kernels of this module."""
    if not _kernels:
        cpu_coded.load()
        _kernels["decode"] = runtime.compile_kernel(_decode_kernel)
    return _kernels


def _decode(packed: Packed, n: int, ids: torch.Tensor | None = None) -> torch.Tensor:
    """The first n rows (or those of ids) as float32 [n, groups * 32]."""
    groups = packed.panels.shape[1]
    target = torch.empty(n, groups * GROUP)
    runtime.launch(
        load()["decode"], torch.get_num_threads() if n * groups > 512 else 1, packed.bits, packed.panels.data_ptr(),
        target.data_ptr(), 0 if ids is None else ids.data_ptr(), n, groups,
    )  # fmt: skip
    return target


def dequantize(packed: Packed) -> torch.Tensor:
    """The weight [n, k] as float32."""
    return _decode(packed, packed.shape[0])[:, : packed.shape[1]].contiguous()


def embedding(ids: torch.Tensor, packed: Packed) -> torch.Tensor:
    """Rows `ids` (int64, any shape, each in [0, n)) as float32 [*ids.shape, k]. IndexError when one is outside."""
    flat = ids.reshape(-1).to(torch.int64).contiguous()
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < packed.shape[0]:
        raise IndexError(f"row outside [0, {packed.shape[0]})")
    return _decode(packed, flat.numel(), flat)[:, : packed.shape[1]].reshape(*ids.shape, packed.shape[1])


def linear(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x[m, k] weight[n, k]^T + bias[n] -> [m, n] in the dtype of x; groups are added up in float32."""
    if x.dtype is not torch.float32 or (bias is not None and bias.dtype is not torch.float32):
        return linear(x.float(), packed, None if bias is None else bias.float()).to(x.dtype)
    (n, k), groups = packed.shape, packed.panels.shape[1]
    x = torch.nn.functional.pad(x, (0, groups * GROUP - k)) if k % GROUP else x.contiguous()
    return cpu_coded.linear(x, packed.panels, packed.bits, n, bias)
