"""Weight-only int4 for CPUs: groups of 32 along k, weight = scale * code + minimum, activations stay float32.

A group is 16 bytes of codes (element i in the low nibble of byte i, element 16 + i in the high one), a float16 scale and a
float16 minimum: 5 bits a weight. That is the precision of GGUF's Q4_1, and quantizing a dequantized Q4_1 weight gives its
codes, scales and minima back. Any n and k: k is padded to a multiple of 32 inside.

Against the float64 product of the dequantized weight the relative error is below 1e-5; the error of int4 itself depends on the
weight: for normal random weights about 8 % of the standard deviation of the output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from llmkit_kernels import cpu_linear as cpu

GROUP = 32
MAX_TILE_ROWS = 64  # rows of x up to which weights are decoded a block at a time; above, all at once for the matrix product
BLOCK = 16  # rows of the weight decoded at a time
_DECODED_ELEMENTS = 4 << 20  # of weight decoded at once for a matrix product: 16 MiB
LANES = 8  # set by load(), constants of the compiled code
_kernels: dict[str, Any] = {}
decode_rows: Any = None  # inner functions, bound by load()
single_row: Any = None
tile_rows: Any = None


@dataclass(frozen=True)
class Packed:
    """An int4 weight [n, k]: codes uint8 [n, groups * 16], scales and minima float16 [n, groups]."""

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and minima."""
        return self.codes.nbytes + self.scales.nbytes + self.minima.nbytes


def _quantize_kernel(args: Any) -> None:
    """args: weight, codes, scales, minima, n, groups, rows a piece; the weight's rows are groups * 32 long."""
    w, codes, scales, minima, n, groups, piece = args[1], args[2], args[3], args[4], args[5], args[6], args[7]
    while True:
        start = cpu.take(args, 0) * piece
        if start >= n:
            break
        for g in range(start * groups, min(start + piece, n) * groups):
            source = w + 4 * GROUP * g
            low = high = cpu.vload(source)
            for i in range(LANES, GROUP, LANES):
                value = cpu.vload(source + 4 * i)
                low, high = cpu.vmin(low, value), cpu.vmax(high, value)
            least = cpu.vbottom(low)
            # Codes are found with the rounded scale and minimum, those that decoding will use.
            cpu.hstore(scales + 2 * g, (cpu.vtop(high) - least) / 15)
            cpu.hstore(minima + 2 * g, least)
            scale, minimum = cpu.hload(scales + 2 * g), cpu.vsplat(cpu.hload(minima + 2 * g))
            inverse = cpu.vsplat(1 / scale if scale > 0 else 0.0)
            for i in range(0, GROUP // 2, LANES):
                first = cpu.vround(cpu.vmul(cpu.vsub(cpu.vload(source + 4 * i), minimum), inverse))
                second = cpu.vround(cpu.vmul(cpu.vsub(cpu.vload(source + 64 + 4 * i), minimum), inverse))
                first = cpu.vmin(cpu.vmax(first, cpu.vsplat(0.0)), cpu.vsplat(15.0))
                second = cpu.vmin(cpu.vmax(second, cpu.vsplat(0.0)), cpu.vsplat(15.0))
                cpu.vstore_codes(codes + 16 * g + i, first, second)


def _decode_rows(codes: int, scales: int, minima: int, groups: int, target: int) -> None:
    """Decode `groups` consecutive groups to float32."""
    for g in range(groups):
        scale, minimum = cpu.vsplat(cpu.hload(scales + 2 * g)), cpu.vsplat(cpu.hload(minima + 2 * g))
        for i in range(0, GROUP // 2, LANES):
            source, place = codes + 16 * g + i, target + 4 * (GROUP * g + i)
            cpu.vstore(place, cpu.vfma(cpu.vload_low4(source), scale, minimum))
            cpu.vstore(place + 64, cpu.vfma(cpu.vload_high4(source), scale, minimum))


def _single_row(x: int, sums: int, codes: int, scales: int, minima: int, groups: int) -> float:
    """x . w of one row w; sums are those of the groups of x, padded with zeros to a multiple of LANES."""
    total = cpu.vsplat(0.0)
    for g in range(groups):
        source, place = codes + 16 * g, x + 4 * GROUP * g
        part = cpu.vmul(cpu.vload_low4(source), cpu.vload(place))
        part = cpu.vfma(cpu.vload_high4(source), cpu.vload(place + 64), part)
        for i in range(LANES, GROUP // 2, LANES):
            part = cpu.vfma(cpu.vload_low4(source + i), cpu.vload(place + 4 * i), part)
            part = cpu.vfma(cpu.vload_high4(source + i), cpu.vload(place + 64 + 4 * i), part)
        total = cpu.vfma(part, cpu.vsplat(cpu.hload(scales + 2 * g)), total)
    whole = groups // LANES * LANES
    for g in range(0, whole, LANES):
        total = cpu.vfma(cpu.vload_half(minima + 2 * g), cpu.vload(sums + 4 * g), total)
    result = cpu.vsum(total)
    for g in range(whole, groups):
        result += cpu.hload(minima + 2 * g) * cpu.sload(sums + 4 * g)
    return result


def _linear_kernel(args: Any) -> None:
    """args: x, codes, scales, minima, bias, y, m, n, groups, rows a piece, scratch, bytes of scratch a thread, tickets."""
    x, codes, scales, minima, bias, y, m, n, groups, piece = (
        args[1], args[2], args[3], args[4], args[5], args[6], args[7], args[8], args[9], args[10],
    )  # fmt: skip
    scratch = args[11] + cpu.take(args, 13) * args[12]
    k = groups * GROUP
    if m == 1:
        for g in range(groups):
            value = cpu.vload(x + 4 * GROUP * g)
            for i in range(LANES, GROUP, LANES):
                value = cpu.vadd(value, cpu.vload(x + 4 * (GROUP * g + i)))
            cpu.sstore(scratch + 4 * g, cpu.vsum(value))
    while True:
        start = cpu.take(args, 0) * piece
        if start >= n:
            break
        stop = min(start + piece, n)
        if m == 1:
            for j in range(start, stop):
                g = j * groups
                value = single_row(x, scratch, codes + 16 * g, scales + 2 * g, minima + 2 * g, groups)
                cpu.sstore(y + 4 * j, value)
        else:
            for j in range(start, stop, BLOCK):
                count, g = min(BLOCK, stop - j), j * groups
                decode_rows(codes + 16 * g, scales + 2 * g, minima + 2 * g, count * groups, scratch)
                tile_rows(x, 4 * k, m, scratch, 4 * k, count, y + 4 * j, 4 * n, k)
        if bias != 0:
            for i in range(m):
                for j in range(start, stop):
                    place = y + 4 * (i * n + j)
                    cpu.sstore(place, cpu.sload(place) + cpu.sload(bias + 4 * j))


def _decode_kernel(args: Any) -> None:
    """args: codes, scales, minima, target, ids (0: all rows in order), n, groups, rows a piece."""
    codes, scales, minima, target, ids, n, groups, piece = (
        args[1], args[2], args[3], args[4], args[5], args[6], args[7], args[8],
    )  # fmt: skip
    while True:
        start = cpu.take(args, 0) * piece
        if start >= n:
            break
        for j in range(start, min(start + piece, n)):
            g = (j if ids == 0 else cpu.iload64(ids + 8 * j)) * groups
            decode_rows(codes + 16 * g, scales + 2 * g, minima + 2 * g, groups, target + 4 * GROUP * j * groups)


def load() -> dict[str, Any]:
    """Compile or load the kernels of this module."""
    global LANES, decode_rows, single_row, tile_rows
    if not _kernels:
        cpu.load_linear()
        LANES, tile_rows = cpu.LANES, cpu.tile_rows
        decode_rows, single_row = cpu.inner(_decode_rows), cpu.inner(_single_row)
        functions: tuple[Callable[..., None], ...] = (_quantize_kernel, _linear_kernel, _decode_kernel)
        _kernels.update({function.__name__: cpu.compile_kernel(function) for function in functions})
    return _kernels


def quantize(weight: torch.Tensor) -> Packed:
    """Quantize a weight [n, k] of any float dtype. Values must be finite and below 65504 in size."""
    n, k = weight.shape
    groups = -(-k // GROUP)
    source = weight.detach().float()
    if k % GROUP:
        # Repeat the last column: padding must not widen the range of the last group.
        source = torch.cat((source, source[:, -1:].expand(n, groups * GROUP - k)), 1)
    source = source.contiguous()
    codes = torch.empty(n, groups * 16, dtype=torch.uint8)
    scales, minima = (torch.empty(n, groups, dtype=torch.float16) for _ in range(2))
    cpu.launch(
        load()["_quantize_kernel"], torch.get_num_threads(), source.data_ptr(), codes.data_ptr(), scales.data_ptr(),
        minima.data_ptr(), n, groups, 16,
    )  # fmt: skip
    return Packed(codes, scales, minima, (n, k))


def _decode(packed: Packed, first: int, n: int, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Rows first .. first + n (or those of ids) as float32 [n, groups * 32]."""
    groups = packed.scales.shape[1]
    target = torch.empty(n, groups * GROUP)
    cpu.launch(
        load()["_decode_kernel"], torch.get_num_threads() if n * groups > 2048 else 1,
        packed.codes.data_ptr() + 16 * groups * first, packed.scales.data_ptr() + 2 * groups * first,
        packed.minima.data_ptr() + 2 * groups * first, target.data_ptr(), 0 if ids is None else ids.data_ptr(),
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
    y = x.new_empty((m, n))
    threads = torch.get_num_threads()
    size = 4 * groups * (GROUP * BLOCK if m > 1 else 1) + 64
    piece = max(BLOCK, min(64, n // (4 * threads)) & -BLOCK)
    cpu.launch(
        (_kernels or load())["_linear_kernel"], threads if m * n * k > 65536 else 1,
        x.data_ptr(), packed.codes.data_ptr(), packed.scales.data_ptr(), packed.minima.data_ptr(),
        0 if bias is None else bias.data_ptr(), y.data_ptr(), m, n, groups, piece,
        cpu.scratch_address(threads * size), size, 0,
    )  # fmt: skip
    return y


def _large(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    """Decode blocks of rows and multiply by them with the matrix product for float32; x is padded already."""
    n = packed.shape[0]
    step = max(BLOCK, _DECODED_ELEMENTS // x.shape[1])
    if step >= n:
        return cpu.linear(x, _decode(packed, 0, n), bias)
    y = x.new_empty((x.shape[0], n))
    for first in range(0, n, step):
        stop = min(first + step, n)
        part = None if bias is None else bias[first:stop]
        y[:, first:stop] = cpu.linear(x, _decode(packed, first, stop - first), part)
    return y
