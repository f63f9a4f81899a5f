"""Register tiles of matrix products, and the product of a few rows with a weight that is made of them.

Source: register tiling after Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmkit.jit import vector as ops

# Sizes of register tiles; `bind` fixes them by the instruction set.
TILE_ROWS = 3  # rows of x in `dot_tile`: 3x4 accumulators fill AVX2's 16 registers, 6x4 the 32 of AVX-512
OUTER_ROWS = 6  # rows in `outer_tile`
OUTER_VECTORS = 2  # vectors a row in `outer_tile`
PANEL = 16  # rows of the weight that stay in the cache while tiles of x pass over them

dot_tile: Any = None  # (MR, NR, a, lda, b, ldb, c, ldc, k, ahead): c[i, j] = sum a[i, :] b[j, :]
outer_tile: Any = None  # (MR, NV, a, lda, b, ldb, c, ldc, k, add, ahead): c[i, :] (+)= sum a[i, j] b[j, :]
rows_times_weight: Any = None  # `_rows_times_weight` for use inside kernels


def bind() -> None:
    """Make the tiles for the vectors that `vector.bind` chose. Imports numba."""
    global TILE_ROWS, OUTER_VECTORS, dot_tile, outer_tile, rows_times_weight
    import numba

    if ops.LANES == 16:
        TILE_ROWS, OUTER_VECTORS = 6, 4
    dot_tile, outer_tile = tile_operation(8, _emit_dot_tile), tile_operation(9, _emit_outer_tile)
    rows_times_weight = numba.njit(error_model="numpy", inline="never")(_rows_times_weight)


def tile_operation(values: int, emit: Callable[..., None], literals: int = 2) -> Any:
    """An intrinsic whose first `literals` arguments are literal integers, followed by `values` int64."""
    from numba.core import types
    from numba.extending import intrinsic

    def typed(_context: Any, *arguments: Any) -> Any:
        sizes = arguments[:literals]
        if not all(isinstance(size, types.IntegerLiteral) for size in sizes):
            return None

        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            emit(builder, *[size.literal_value for size in sizes], *args[literals:])
            return context.get_dummy_value()

        return types.void(*sizes, *[types.int64] * values), codegen

    return intrinsic(prefer_literal=True)(ops.with_arity(typed, 1 + literals + values))


def _emit_dot_tile(
    builder: Any, mr: int, nr: int, a: Any, lda: Any, b: Any, ldb: Any, c: Any, ldc: Any, k: Any, ahead: Any
) -> None:
    """c[i, j] = sum over k of a[i, k] b[j, k] for an mr x nr tile; strides in bytes, nr 1 or 4, k any number.

    With nr = 4 the 4 rows (2 when mr > 3) at `ahead`, as long and as far apart as those of b, are prefetched
    meanwhile.
    """
    from llvmlite import ir

    vector, single, i64 = ir.VectorType(ir.FloatType(), ops.LANES), ir.FloatType(), ir.IntType(64)
    a_rows, b_rows = ops.emit_rows(builder, a, lda, mr), ops.emit_rows(builder, b, ldb, nr)
    ahead_rows = ops.emit_rows(builder, ahead, ldb, 2 if mr > 3 else 4) if nr == 4 else []
    kinds: dict[Any, str] = {vector: f"llvm.fma.v{ops.LANES}f32", single: "llvm.fma.f32"}

    def body(kind: Any) -> Callable[..., list[Any]]:
        def step(index: Any, values: list[Any]) -> list[Any]:
            # A step of 8 lanes is half a cache line: there one instruction walks over two rows.
            for row in ahead_rows[:: 16 // ops.LANES] if kind is vector else []:
                offset = index if ops.LANES == 16 else builder.shl(index, ir.Constant(i64, 1))
                ops.emit_prefetch(builder, builder.add(row, offset))
            lefts = [ops.emit_load(builder, builder.add(row, index), kind) for row in a_rows]
            result = list(values)
            for j, row in enumerate(b_rows):
                place = builder.add(row, index)
                right = ops.emit_load(builder, place, kind)
                for i, left in enumerate(lefts):
                    result[i * nr + j] = ops.emit_call(builder, kinds[kind], kind, left, right, values[i * nr + j])
            return result

        return step

    total = builder.shl(k, ir.Constant(i64, 2))
    main = builder.and_(total, ir.Constant(i64, -4 * ops.LANES))
    start = [ir.Constant(vector, [0.0] * ops.LANES)] * (mr * nr)
    sums = ops.emit_loop(builder, ir.Constant(i64, 0), main, 4 * ops.LANES, start, body(vector))
    sums = [emit_fold(builder, sums[i * nr : (i + 1) * nr]) for i in range(mr)]
    parts = [builder.extract_element(row, ir.Constant(ir.IntType(32), j)) for row in sums for j in range(nr)]
    parts = ops.emit_loop(builder, main, total, 4, parts, body(single))
    for i, row in enumerate(ops.emit_rows(builder, c, ldc, mr)):
        for j in range(nr):
            target = builder.add(row, ir.Constant(i64, 4 * j))
            ops.emit_store(builder, target, parts[i * nr + j])


def emit_fold(builder: Any, values: list[Any]) -> Any:
    """The sums of the lanes of one or four vectors, as lanes of a vector of four."""
    rows = list(values)
    count = ops.LANES
    while count > 4:
        count //= 2
        low, high = range(count), range(count, 2 * count)
        rows = [builder.fadd(ops.emit_shuffle(builder, v, v, low), ops.emit_shuffle(builder, v, v, high)) for v in rows]
    rows = rows * 4 if len(rows) == 1 else rows
    pairs = [
        builder.fadd(ops.emit_shuffle(builder, x, y, (0, 1, 4, 5)), ops.emit_shuffle(builder, x, y, (2, 3, 6, 7)))
        for x, y in (rows[:2], rows[2:])
    ]
    even, odd = (ops.emit_shuffle(builder, pairs[0], pairs[1], lanes) for lanes in ((0, 2, 4, 6), (1, 3, 5, 7)))
    return builder.fadd(even, odd)


def _emit_outer_tile(
    builder: Any, mr: int, nv: int, a: Any, lda: Any, b: Any, ldb: Any, c: Any, ldc: Any, k: Any, add: Any, ahead: Any
) -> None:
    """c[i, :] = (add ? c[i, :] : 0) + sum over j < k of a[i, j] b[j, :] for mr rows of nv vectors; strides in bytes.

    With mr < OUTER_ROWS the memory `ahead` bytes after each piece of b is prefetched.
    """
    from llvmlite import ir

    vector, i64 = ir.VectorType(ir.FloatType(), ops.LANES), ir.IntType(64)
    a_rows, c_rows = ops.emit_rows(builder, a, lda, mr), ops.emit_rows(builder, c, ldc, mr)
    targets = [builder.add(row, ir.Constant(i64, 4 * ops.LANES * j)) for row in c_rows for j in range(nv)]
    keep = builder.icmp_signed("!=", add, ir.Constant(i64, 0))
    none, fma = ir.Constant(vector, [0.0] * ops.LANES), f"llvm.fma.v{ops.LANES}f32"
    start = [builder.select(keep, ops.emit_load(builder, target, vector), none) for target in targets]

    def step(index: Any, values: list[Any]) -> list[Any]:
        row = values[-1]
        places = [builder.add(row, ir.Constant(i64, 4 * ops.LANES * j)) for j in range(nv)]
        rights = [ops.emit_load(builder, place, vector) for place in places]
        for j in range(0, nv if mr < OUTER_ROWS else 0, 16 // ops.LANES):
            ops.emit_prefetch(builder, builder.add(builder.add(row, ahead), ir.Constant(i64, 4 * ops.LANES * j)))
        result = []
        for i in range(mr):
            single = ops.emit_load(builder, builder.add(a_rows[i], index), ir.FloatType())
            left = ops.emit_splat(builder, single, vector)
            result += [ops.emit_call(builder, fma, vector, left, rights[j], values[i * nv + j]) for j in range(nv)]
        return [*result, builder.add(row, ldb)]

    stop = builder.shl(k, ir.Constant(i64, 2))
    sums = ops.emit_loop(builder, ir.Constant(i64, 0), stop, 4, [*start, b], step)
    for value, target in zip(sums[:-1], targets, strict=True):
        ops.emit_store(builder, target, value)


def _rows_times_weight(x: int, ldx: int, m: int, w: int, ldw: int, n: int, y: int, ldy: int, k: int) -> None:
    """y[m, n] = x[m, k] w[n, k]^T on the calling thread; strides in bytes. Compiled into the kernels that call it."""
    for first in range(0, n & -4, PANEL):
        last = min(first + PANEL, n & -4)
        ahead = w + (first + PANEL) * ldw  # rows of the next panel, fetched while this one is used
        i = 0
        while i + TILE_ROWS <= m:
            for j in range(first, last, 4):
                place = y + i * ldy + 4 * j
                dot_tile(TILE_ROWS, 4, x + i * ldx, ldx, w + j * ldw, ldw, place, ldy, k, ahead)
                ahead += 2 * ldw if TILE_ROWS > 3 else 4 * ldw
            i += TILE_ROWS
        while i < m:
            step = min(m - i, 3)
            for j in range(first, last, 4):
                place = y + i * ldy + 4 * j
                if step == 3:
                    dot_tile(3, 4, x + i * ldx, ldx, w + j * ldw, ldw, place, ldy, k, ahead)
                elif step == 2:
                    dot_tile(2, 4, x + i * ldx, ldx, w + j * ldw, ldw, place, ldy, k, ahead)
                else:
                    dot_tile(1, 4, x + i * ldx, ldx, w + j * ldw, ldw, place, ldy, k, ahead)
                ahead += 4 * ldw
            i += step
    for j in range(n & -4, n):
        for i in range(m):
            dot_tile(1, 1, x + i * ldx, ldx, w + j * ldw, ldw, y + i * ldy + 4 * j, ldy, k, 0)
