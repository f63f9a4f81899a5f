"""Weight-only int8 for CPUs: groups of 32 along k, weight = scale * code with codes -127..127.

A group is 32 codes and a float16 scale: 8.5 bits a weight, the precision of GGUF's Q8_0; quantizing a
dequantized Q8_0 weight gives its codes and scales back. Meant for embeddings tied to the last layer, and for
linear layers. Any n and k: k is padded to a multiple of 32 inside.

Products are float32 with the dequantized weight: the relative error against float64 is below 1e-5. The error of int8
itself is, for normal random weights, about 5e-3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from llmkit.jit import runtime, tiles
from llmkit.jit import vector as ops
from llmkit_quantization import cpu_coded

GROUP = 32
MAX_FEW_ROWS = 16  # rows of x up to which weights are decoded in registers
MAX_TILE_ROWS = 64  # rows of x up to which weights are decoded a block at a time; above, for the matrix product
BLOCK = 4  # rows of the weight decoded at a time: they fit in the first cache
_DECODED_ELEMENTS = 4 << 20  # of weight decoded at once for a matrix product: 16 MiB
LANES = 8  # set by load(), constants of the compiled code
_kernels: dict[str, Any] = {}
decode_rows: Any = None  # inner functions, bound by load()


@dataclass(frozen=True)
class Packed:
    """An int8 weight [n, k]: codes int8 [n, groups * 32], scales float16 [n, groups]."""

    codes: torch.Tensor
    scales: torch.Tensor
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes


def _quantize_kernel(args: Any) -> None:
    """args: weight, codes, scales, n, groups, rows a piece; the weight's rows are groups * 32 long."""
    w, codes, scales, n, groups, piece = args[1], args[2], args[3], args[4], args[5], args[6]
    zero, limit = ops.vsplat(0.0), ops.vsplat(127.0)
    least = ops.vsub(zero, limit)
    while True:
        start = ops.take(args, 0) * piece
        if start >= n:
            break
        for g in range(start * groups, min(start + piece, n) * groups):
            source = w + 4 * GROUP * g
            size = zero
            for i in range(0, GROUP, LANES):
                value = ops.vload(source + 4 * i)
                size = ops.vmax(size, ops.vmax(value, ops.vsub(zero, value)))
            # Codes are found with the rounded scale, the one that decoding will use.
            ops.hstore(scales + 2 * g, ops.vtop(size) / 127)
            scale = ops.hload(scales + 2 * g)
            inverse = ops.vsplat(1 / scale if scale > 0 else 0.0)
            for i in range(0, GROUP, LANES):
                code = ops.vround(ops.vmul(ops.vload(source + 4 * i), inverse))
                ops.vstore_int8(codes + GROUP * g + i, ops.vmax(ops.vmin(code, limit), least))


def _decode_rows(codes: int, scales: int, groups: int, target: int) -> None:
    """Decode `groups` consecutive groups to float32."""
    for g in range(groups):
        scale = ops.vsplat(ops.hload(scales + 2 * g))
        for i in range(GROUP * g, GROUP * g + GROUP, LANES):
            ops.vstore(target + 4 * i, ops.vmul(ops.vload_int8(codes + i), scale))


def _linear_kernel(args: Any) -> None:
    """args: x, codes, scales, bias, y, m, n, groups, rows a piece, scratch, bytes of scratch a thread, tickets."""
    x, codes, scales, bias, y, m, n, groups, piece = (
        args[1], args[2], args[3], args[4], args[5], args[6], args[7], args[8], args[9],
    )  # fmt: skip
    scratch = args[10] + ops.take(args, 12) * args[11]
    k = groups * GROUP
    while True:
        start = ops.take(args, 0) * piece
        if start >= n:
            break
        stop = min(start + piece, n)
        for j in range(start, stop, BLOCK):
            count, g = min(BLOCK, stop - j), j * groups
            decode_rows(codes + GROUP * g, scales + 2 * g, count * groups, scratch)
            tiles.rows_times_weight(x, 4 * k, m, scratch, 4 * k, count, y + 4 * j, 4 * n, k)
        if bias != 0:
            for i in range(m):
                for j in range(start, stop):
                    place = y + 4 * (i * n + j)
                    ops.sstore(place, ops.sload(place) + ops.sload(bias + 4 * j))


def _decode_kernel(args: Any) -> None:
    """args: codes, scales, target, ids (0: all rows in order), n, groups, rows a piece."""
    codes, scales, target, ids, n, groups, piece = (
        args[1], args[2], args[3], args[4], args[5], args[6], args[7],
    )  # fmt: skip
    while True:
        start = ops.take(args, 0) * piece
        if start >= n:
            break
        for j in range(start, min(start + piece, n)):
            g = (j if ids == 0 else ops.iload64(ids + 8 * j)) * groups
            decode_rows(codes + GROUP * g, scales + 2 * g, groups, target + 4 * GROUP * j * groups)


def load() -> dict[str, Any]:
    """Compile or load the kernels of this module."""
    global LANES, decode_rows
    if not _kernels:
        runtime.load()
        LANES, decode_rows = ops.LANES, runtime.inner(_decode_rows)
        functions: list[Callable[..., None]] = [_quantize_kernel, _linear_kernel, _decode_kernel]
        _kernels.update({function.__name__: runtime.compile_kernel(function) for function in functions})
    return _kernels


def quantize(weight: torch.Tensor) -> Packed:
    """Quantize a weight [n, k] of any float dtype. Values must be finite and below 8e6 in size."""
    n, k = weight.shape
    groups = -(-k // GROUP)
    source = weight.detach().float()
    if k % GROUP:
        source = torch.nn.functional.pad(source, (0, groups * GROUP - k))
    source = source.contiguous()
    codes = torch.empty(n, groups * GROUP, dtype=torch.int8)
    scales = torch.empty(n, groups, dtype=torch.float16)
    runtime.launch(
        load()["_quantize_kernel"], torch.get_num_threads(), source.data_ptr(), codes.data_ptr(), scales.data_ptr(),
        n, groups, 16,
    )  # fmt: skip
    return Packed(codes, scales, (n, k))


def _decode(packed: Packed, first: int, n: int, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Rows first .. first + n (or those of ids) as float32 [n, groups * 32]."""
    groups = packed.scales.shape[1]
    target = torch.empty(n, groups * GROUP)
    runtime.launch(
        load()["_decode_kernel"], torch.get_num_threads() if n * groups > 2048 else 1,
        packed.codes.data_ptr() + GROUP * groups * first, packed.scales.data_ptr() + 2 * groups * first,
        target.data_ptr(), 0 if ids is None else ids.data_ptr(),
        n, groups, 16,
    )  # fmt: skip
    return target


def dequantize(packed: Packed) -> torch.Tensor:
    """The weight [n, k] as float32."""
    return _decode(packed, 0, packed.shape[0])[:, : packed.shape[1]].contiguous()


def embedding(ids: torch.Tensor, packed: Packed) -> torch.Tensor:
    """Rows `ids` (int64, any shape, each in [0, n)) as float32 [*ids.shape, k]. IndexError when one is outside."""
    flat = ids.reshape(-1).to(torch.int64).contiguous()
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < packed.shape[0]:
        raise IndexError(f"row outside [0, {packed.shape[0]})")
    return _decode(packed, 0, flat.numel(), flat)[:, : packed.shape[1]].reshape(*ids.shape, packed.shape[1])


def linear(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x[m, k] weight[n, k]^T + bias[n] -> [m, n] in the dtype of x; computed in float32."""
    m, (n, k), groups = x.shape[0], packed.shape, packed.scales.shape[1]
    if x.dtype is not torch.float32 or (bias is not None and bias.dtype is not torch.float32):
        return linear(x.float(), packed, None if bias is None else bias.float()).to(x.dtype)
    x = torch.nn.functional.pad(x, (0, groups * GROUP - k)) if k % GROUP else x.contiguous()
    if m > MAX_TILE_ROWS:
        return _large(x, packed, bias)
    if m <= MAX_FEW_ROWS:
        return cpu_coded.linear(x, packed.codes, packed.scales, None, bias)
    y = runtime.empty((m, n))
    kernels = _kernels or load()
    threads = torch.get_num_threads() if m * n * k > 65536 else 1
    places = (
        x.data_ptr(), packed.codes.data_ptr(), packed.scales.data_ptr(), 0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
    )  # fmt: skip
    size = 4 * groups * GROUP * BLOCK + 64
    piece = max(BLOCK, min(64, n // (4 * threads)) & -16)
    scratch = runtime.scratch_address(threads * size)
    runtime.launch(kernels["_linear_kernel"], threads, *places, m, n, groups, piece, scratch, size, 0)
    return y


def _large(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    """Decode blocks of rows and multiply by them with the matrix product for float32; x is padded already."""
    n = packed.shape[0]
    step = max(16, _DECODED_ELEMENTS // x.shape[1])
    if step >= n:
        return torch.nn.functional.linear(x, _decode(packed, 0, n), bias)
    y = x.new_empty((x.shape[0], n))
    for first in range(0, n, step):
        stop = min(first + step, n)
        part = None if bias is None else bias[first:stop]
        y[:, first:stop] = torch.nn.functional.linear(x, _decode(packed, first, stop - first), part)
    return y
