"""The product of a few rows of x with int4 or int8 codes, decoded in registers, for CPUs.

Decoding costs about as much as one row of products, so up to FEW_ROWS rows of x share it; more rows are better served
by decoding blocks of the weight to memory. Everything is float32 and each weight is decoded as `dequantize` does it:
the relative error against the float64 product with the dequantized weight is below 1e-5, and an answer does not depend
on the rows beside it beyond the order of summation.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from llmkit.jit import runtime, tiles
from llmkit.jit import vector as ops

GROUP = 32
STREAMS = 4  # runs of rows of the weight that one thread reads at once
PIECE = 16  # rows of a run taken at a time
LANES = 8  # set by load(), as everything below; constants of the compiled code
FEW_ROWS = 2  # of x that one pass over the weight serves: as many as its accumulators fit in registers
coded_tile: Any = None
widen: Any = None
rows_product: Any = None
_kernel: Any = None


def emit_coded_tile(builder: Any, rows: int, bits: int, m: Any, *places: Any) -> None:
    """y[i, j] = x[i, :] w[j, :] for m <= FEW_ROWS rows of x and `rows` (1 or 4) rows w of codes of `bits` (4 or 8).

    places: as in `_emit_rows_tile`, which is emitted for each m.
    """
    for count in range(1, FEW_ROWS + 1):
        with builder.if_then(builder.icmp_signed("==", m, m.type(count))):
            _emit_rows_tile(builder, rows, bits, count, *places)


def _emit_rows_tile(
    builder: Any, rows: int, bits: int, m: int, codes: Any, stride: Any, scales: Any, minima: Any, step: Any, x: Any,
    ldx: Any, y: Any, ldy: Any, gap: Any, groups: Any,
) -> None:  # fmt: skip
    """stride, step, ldx: bytes between rows of codes, of (float32) scales and minima, of x; ldy, gap: between outputs
    of neighbouring rows of x and of w. 8-bit codes are signed and have no minima.
    """
    from llvmlite import ir

    i64, i32 = ir.IntType(64), ir.IntType(32)
    lanes = ops.LANES
    floats, words = ir.VectorType(ir.FloatType(), lanes), ir.VectorType(i32, lanes)
    code_rows, scale_rows = ops.emit_rows(builder, codes, stride, rows), ops.emit_rows(builder, scales, step, rows)
    minimum_rows = ops.emit_rows(builder, minima, step, rows)
    x_rows = ops.emit_rows(builder, x, ldx, m)
    decode = partial(_decode_low_high, builder, words, floats) if bits == 4 else partial(_decode_bytes, builder, words)

    def splat(base: Any, group: Any) -> Any:
        place = builder.add(base, builder.shl(group, ir.Constant(i64, 2)))
        return ops.emit_splat(builder, ops.emit_load(builder, place, ir.FloatType()), floats)

    def body(group: Any, values: list[Any]) -> list[Any]:
        offset = builder.shl(group, ir.Constant(i64, 7))
        lefts = []
        for row in x_rows:
            place = builder.add(row, offset)
            parts = [builder.add(place, ir.Constant(i64, 4 * i)) for i in range(0, GROUP, lanes)]
            lefts.append([ops.emit_load(builder, part, floats) for part in parts])
        result = []
        for j in range(rows):
            place = builder.add(code_rows[j], builder.shl(group, ir.Constant(i64, 4 if bits == 4 else 5)))
            minimum = splat(minimum_rows[j], group) if bits == 4 else None
            weights = decode(place, splat(scale_rows[j], group), minimum)
            for i, left in enumerate(lefts):
                value = values[j * m + i]
                for a, b in zip(left, weights, strict=True):
                    value = ops.emit_call(builder, f"llvm.fma.v{lanes}f32", floats, a, b, value)
                result.append(value)
        return result

    zero = [ir.Constant(floats, [0.0] * lanes)] * (rows * m)
    totals = ops.emit_loop(builder, ir.Constant(i64, 0), groups, 1, zero, body)
    for i, place in enumerate(ops.emit_rows(builder, y, ldy, m)):
        sums = tiles.emit_fold(builder, totals[i::m])
        for j, target in enumerate(ops.emit_rows(builder, place, gap, rows)):
            ops.emit_store(builder, target, builder.extract_element(sums, ir.Constant(i32, j)))


def _decode_low_high(builder: Any, words: Any, floats: Any, place: Any, scale: Any, minimum: Any) -> list[Any]:
    """The 32 weights of the 16 bytes at `place`, in order, in vectors."""
    from llvmlite import ir

    lanes, byte = ops.LANES, ir.IntType(8)
    four, mask = (ir.Constant(words, [value] * lanes) for value in (4, 15))
    fma = f"llvm.fma.v{lanes}f32"
    low, high = [], []
    for first in range(0, GROUP // 2, lanes):
        source = builder.add(place, ir.Constant(ir.IntType(64), first))
        both = builder.zext(ops.emit_load(builder, source, ir.VectorType(byte, lanes)), words)
        upper = builder.lshr(both, four)
        if lanes == 16:
            # All 16 values that a code can mean fit in one register, from which the codes choose (by their low 4 bits).
            numbers = ir.Constant(floats, [float(value) for value in range(16)])
            table = ops.emit_call(builder, fma, floats, numbers, scale, minimum)
            for part, codes in ((low, both), (high, upper)):
                part.append(ops.emit_call(builder, "llvm.x86.avx512.permvar.sf.512", floats, table, codes))
        else:
            for part, codes in ((low, builder.and_(both, mask)), (high, upper)):
                part.append(ops.emit_call(builder, fma, floats, builder.sitofp(codes, floats), scale, minimum))
    return low + high


def emit_decode_group(builder: Any, place: Any, scale: Any, minimum: Any, target: Any) -> None:
    """Decode the 32 4-bit weights of the 16 bytes at `place` to `target`; scale and minimum are float32."""
    from llvmlite import ir

    floats, words = (ir.VectorType(kind, ops.LANES) for kind in (ir.FloatType(), ir.IntType(32)))
    scale, minimum = ops.emit_splat(builder, scale, floats), ops.emit_splat(builder, minimum, floats)
    for i, weights in enumerate(_decode_low_high(builder, words, floats, place, scale, minimum)):
        ops.emit_store(builder, builder.add(target, ir.Constant(ir.IntType(64), 4 * ops.LANES * i)), weights)


def _decode_bytes(builder: Any, words: Any, place: Any, scale: Any, _minimum: None) -> list[Any]:
    """The 32 weights of the 32 bytes at `place`, in vectors."""
    from llvmlite import ir

    kind = ir.VectorType(ir.IntType(8), ops.LANES)
    sources = [builder.add(place, ir.Constant(ir.IntType(64), first)) for first in range(0, GROUP, ops.LANES)]
    codes = [builder.sext(ops.emit_load(builder, source, kind), words) for source in sources]
    return [builder.fmul(builder.sitofp(code, scale.type), scale) for code in codes]


def _widen(source: int, count: int, target: int) -> None:
    """float16 to float32."""
    whole = count // LANES * LANES
    for g in range(0, whole, LANES):
        ops.vstore(target + 4 * g, ops.vload_half(source + 2 * g))
    for g in range(whole, count):
        ops.sstore(target + 4 * g, ops.hload(source + 2 * g))


def _rows_product(
    codes: int, gap: int, factors: int, minima: int, x: int, m: int, y: int, n: int, groups: int, single: int
) -> None:
    """m rows of x times STREAMS rows of the weight (one if `single`) that are `gap` rows apart; minima 0: int8."""
    k, step, wide = 4 * GROUP * groups, 4 * groups, 4 * n
    stride = gap * groups * (GROUP if minima == 0 else GROUP // 2)
    for i in range(0, m, FEW_ROWS):
        left, place, count = x + i * k, y + i * wide, min(m - i, FEW_ROWS)
        if minima == 0:
            if single:
                coded_tile(1, 8, count, codes, 0, factors, 0, 0, left, k, place, wide, 0, groups)
            else:
                coded_tile(STREAMS, 8, count, codes, stride, factors, 0, step, left, k, place, wide, 4 * gap, groups)
        elif single:
            coded_tile(1, 4, count, codes, 0, factors, minima, 0, left, k, place, wide, 0, groups)
        else:
            coded_tile(STREAMS, 4, count, codes, stride, factors, minima, step, left, k, place, wide, 4 * gap, groups)


def _few_kernel(args: Any) -> None:
    """args: tickets, x, codes, scales, minima (0: int8 codes), bias (0: none), y, m, n, groups, rows a piece, threads,
    rows a run, scratch, its bytes a thread, then a counter a share. A share is STREAMS runs of rows of the weight.
    """
    x, codes, scales, minima, bias, y, m, n, groups, piece, threads, run = (
        args[1], args[2], args[3], args[4], args[5], args[6], args[7], args[8], args[9], args[10], args[11], args[12],
    )  # fmt: skip
    ticket = ops.take(args, 0)
    factors = args[13] + ticket * args[14]
    least = 0 if minima == 0 else factors + 4 * groups * STREAMS
    size = groups * (GROUP if minima == 0 else GROUP // 2)
    for turn in range(threads):
        part = (ticket + turn) % threads
        while True:
            start = ops.take(args, 15 + part) * piece
            if start >= run:
                break
            for j in range(part * STREAMS * run + start, part * STREAMS * run + min(start + piece, run)):
                for i in range(STREAMS):
                    row = min(j + i * run, n - 1)
                    widen(scales + 2 * groups * row, groups, factors + 4 * groups * i)
                    if minima != 0:
                        widen(minima + 2 * groups * row, groups, least + 4 * groups * i)
                if j + (STREAMS - 1) * run < n:
                    rows_product(codes + size * j, run, factors, least, x, m, y + 4 * j, n, groups, 0)
                else:
                    for row in range(j, n, run):
                        near = 4 * groups * ((row - j) // run)
                        low = 0 if minima == 0 else least + near
                        rows_product(codes + size * row, 0, factors + near, low, x, m, y + 4 * row, n, groups, 1)
                if bias != 0:
                    for row in range(j, min(n, j + STREAMS * run), run):
                        for i in range(m):
                            place = y + 4 * (i * n + row)
                            ops.sstore(place, ops.sload(place) + ops.sload(bias + 4 * row))


def load() -> None:
    """Compile or load the kernel."""
    global LANES, FEW_ROWS, coded_tile, widen, rows_product, _kernel
    if _kernel is None:
        runtime.load()
        LANES, FEW_ROWS = ops.LANES, 4 if ops.LANES == 16 else 2
        coded_tile = tiles.tile_operation(12, emit_coded_tile)
        widen, rows_product = runtime.inner(_widen), runtime.inner(_rows_product)
        _kernel = runtime.compile_kernel(_few_kernel)


def linear(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """x[m, k] w[n, k]^T + bias -> [m, n]; x and bias float32, x contiguous, k whole groups; minima None: int8 codes."""
    if _kernel is None:
        load()
    m, (n, groups) = x.shape[0], scales.shape
    y = runtime.empty((m, n))
    threads = torch.get_num_threads() if m * n * groups > 2048 else 1
    size = (8 * groups * STREAMS + 127) & -64
    runtime.launch(
        _kernel, threads, x.data_ptr(), codes.data_ptr(), scales.data_ptr(),
        0 if minima is None else minima.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr(), m, n, groups,
        PIECE, threads, -(-n // (threads * STREAMS)), runtime.scratch_address(threads * size), size,
        *((0,) * threads),
    )  # fmt: skip
    return y
