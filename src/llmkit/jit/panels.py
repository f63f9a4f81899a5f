"""Products with a weight that is stored in panels, for any number of rows.

A panel holds WIDTH rows of the weight [n, k], element by element: [n / WIDTH, k, WIDTH]. A tile of the product then
reads one stream, needs no sums across lanes, and the same layout serves one row at the speed of the memory and
thousands at the speed of the multipliers.

Source: Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008), for panels and the order of
the loops; the weight being constant, it is packed once.
"""

from __future__ import annotations

from typing import Any

from llmkit.jit import tiles
from llmkit.jit import vector as ops

UNROLL = 4  # steps of k in one round of a loop: k must be a multiple
MAX_ROWS = 6  # rows of x in a tile
STREAMS = 4  # panels that one thread reads at once when x is a single row
CHUNK_BYTES = 512 << 10  # of x that stay in the second cache while panels pass over them
NEAR = 1024  # bytes by which a stream is fetched ahead when x is a single row

# Fixed by `bind`, constants of the compiled code.
LANES = 8
VECTORS = 2  # a panel's width in vectors: 6x2 accumulators fill AVX2's 16 registers, 6x4 the 32 of AVX-512
WIDTH = 16
HALF = 1  # vectors of half a panel, the piece in which the panels that are left over are dealt out
LINES = 1  # cache lines of one step of a panel
FIRST_LINES = 1  # of them fetched ahead in each of the first two tiles

panel_tile: Any = None  # (MR, NV, lines, a, lda, b, c, ldc, k, ahead): c[i, :] = sum a[i, j] b[j, :]
row_tile: Any = None  # (panels, NV, a, b, gap, c, cgap, k): the same for one row and panels that are `gap` bytes apart
only_tile: Any = None
one_of_tiles: Any = None


def bind() -> None:
    """Make the tiles for the vectors that `vector.bind` chose. Imports numba."""
    global LANES, VECTORS, WIDTH, HALF, LINES, FIRST_LINES, panel_tile, row_tile, only_tile, one_of_tiles
    import numba

    LANES = ops.LANES
    if LANES == 16:
        VECTORS, HALF, LINES, FIRST_LINES = 4, 2, 4, 2
    WIDTH = VECTORS * LANES
    panel_tile, row_tile = tiles.tile_operation(7, _emit_panel_tile, 3), tiles.tile_operation(6, _emit_row_tile)
    only_tile = numba.njit(error_model="numpy", inline="never")(_only_tile)
    one_of_tiles = numba.njit(error_model="numpy", inline="never")(_one_of_tiles)


def _emit_panel_tile(
    builder: Any, mr: int, nv: int, lines: int, a: Any, lda: Any, b: Any, c: Any, ldc: Any, k: Any, ahead: Any
) -> None:
    """c[i, :] = sum over j < k of a[i, j] b[j, :] for mr rows of nv vectors; strides in bytes, k in steps of UNROLL.

    Of the memory `ahead` bytes after each step of b, `lines` cache lines are fetched meanwhile.
    """
    from llvmlite import ir

    i64, single, vector = ir.IntType(64), ir.FloatType(), ir.VectorType(ir.FloatType(), ops.LANES)
    a_rows, c_rows = ops.emit_rows(builder, a, lda, mr), ops.emit_rows(builder, c, ldc, mr)
    fma, size = f"llvm.fma.v{ops.LANES}f32", 4 * WIDTH

    def after(address: Any, count: int) -> Any:
        return builder.add(address, ir.Constant(i64, count))

    def body(index: Any, values: list[Any]) -> list[Any]:
        *sums, row = values
        for step in range(UNROLL):
            rights = [ops.emit_load(builder, after(row, step * size + 4 * ops.LANES * j), vector) for j in range(nv)]
            for line in range(lines):
                ops.emit_prefetch(builder, builder.add(after(row, step * size + 64 * line), ahead))
            for i, place in enumerate(a_rows):
                value = ops.emit_load(builder, after(builder.add(place, index), 4 * step), single)
                left = ops.emit_splat(builder, value, vector)
                for j, right in enumerate(rights):
                    at = i * nv + j
                    sums[at] = ops.emit_call(builder, fma, vector, left, right, sums[at])
        return [*sums, after(row, UNROLL * size)]

    zeros = [ir.Constant(vector, [0.0] * ops.LANES)] * (mr * nv)
    stop = builder.shl(k, ir.Constant(i64, 2))
    *sums, _ = ops.emit_loop(builder, ir.Constant(i64, 0), stop, 4 * UNROLL, [*zeros, b], body)
    for i, place in enumerate(c_rows):
        for j in range(nv):
            ops.emit_store(builder, after(place, 4 * ops.LANES * j), sums[i * nv + j])


def _emit_row_tile(builder: Any, panels: int, nv: int, a: Any, b: Any, gap: Any, c: Any, cgap: Any, k: Any) -> None:
    """One row of x times nv vectors of `panels` panels; gap, cgap: bytes between them and between their outputs."""
    from llvmlite import ir

    i64, single, vector = ir.IntType(64), ir.FloatType(), ir.VectorType(ir.FloatType(), ops.LANES)
    b_rows, c_rows = ops.emit_rows(builder, b, gap, panels), ops.emit_rows(builder, c, cgap, panels)
    fma, size, unroll = f"llvm.fma.v{ops.LANES}f32", 4 * WIDTH, 2

    def after(address: Any, count: int) -> Any:
        return builder.add(address, ir.Constant(i64, count))

    def body(index: Any, values: list[Any]) -> list[Any]:
        *sums, offset = values
        for step in range(unroll):
            left = ops.emit_splat(
                builder, ops.emit_load(builder, after(builder.add(a, index), 4 * step), single), vector
            )
            for p, row in enumerate(b_rows):
                place = after(builder.add(row, offset), step * size)
                for line in range(LINES):
                    ops.emit_prefetch(builder, after(place, NEAR + 64 * line))
                for j in range(nv):
                    right, at = ops.emit_load(builder, after(place, 4 * ops.LANES * j), vector), p * nv + j
                    sums[at] = ops.emit_call(builder, fma, vector, left, right, sums[at])
        return [*sums, after(offset, unroll * size)]

    zero = ir.Constant(i64, 0)
    zeros = [ir.Constant(vector, [0.0] * ops.LANES)] * (panels * nv)
    stop = builder.shl(k, ir.Constant(i64, 2))
    *sums, _ = ops.emit_loop(builder, zero, stop, 4 * unroll, [*zeros, zero], body)
    for p, place in enumerate(c_rows):
        for j in range(nv):
            ops.emit_store(builder, after(place, 4 * ops.LANES * j), sums[p * nv + j])


def _only_tile(rows: int, half: int, a: int, lda: int, b: int, c: int, ldc: int, k: int, ahead: int) -> None:
    """A tile that alone covers all rows of x (or, `half`, half a panel): it fetches all of what comes next."""
    if half:
        if rows == 1:
            panel_tile(1, HALF, HALF, a, lda, b, c, ldc, k, ahead)
        elif rows == 2:
            panel_tile(2, HALF, HALF, a, lda, b, c, ldc, k, ahead)
        elif rows == 3:
            panel_tile(3, HALF, HALF, a, lda, b, c, ldc, k, ahead)
        elif rows == 4:
            panel_tile(4, HALF, HALF, a, lda, b, c, ldc, k, ahead)
        elif rows == 5:
            panel_tile(5, HALF, HALF, a, lda, b, c, ldc, k, ahead)
        else:
            panel_tile(6, HALF, HALF, a, lda, b, c, ldc, k, ahead)
    elif rows == 1:
        panel_tile(1, VECTORS, LINES, a, lda, b, c, ldc, k, ahead)
    elif rows == 2:
        panel_tile(2, VECTORS, LINES, a, lda, b, c, ldc, k, ahead)
    elif rows == 3:
        panel_tile(3, VECTORS, LINES, a, lda, b, c, ldc, k, ahead)
    elif rows == 4:
        panel_tile(4, VECTORS, LINES, a, lda, b, c, ldc, k, ahead)
    elif rows == 5:
        panel_tile(5, VECTORS, LINES, a, lda, b, c, ldc, k, ahead)
    else:
        panel_tile(6, VECTORS, LINES, a, lda, b, c, ldc, k, ahead)


def _one_of_tiles(rows: int, a: int, lda: int, b: int, c: int, ldc: int, k: int, ahead: int) -> None:
    """One of several tiles of a panel, of 3 to MAX_ROWS rows."""
    if rows <= 3:
        panel_tile(3, VECTORS, FIRST_LINES, a, lda, b, c, ldc, k, ahead)
    elif rows == 4:
        panel_tile(4, VECTORS, FIRST_LINES, a, lda, b, c, ldc, k, ahead)
    elif rows == 5:
        panel_tile(5, VECTORS, FIRST_LINES, a, lda, b, c, ldc, k, ahead)
    else:
        panel_tile(6, VECTORS, FIRST_LINES, a, lda, b, c, ldc, k, ahead)
