"""The product of x with a weight held as int4 or int8 codes, for CPUs.

Each group of 32 elements of a row of x is rounded to 16-bit integers with a scale of its own, which is exact to 1 part
in 65 534 of the group's largest element. A group's products with the codes are then added up as integers, two by two
in one instruction (VNNI where the processor has it), and the groups in float32, in order. Integer sums are exact in any
order, so that a row of the result does not depend on the rows beside it or on the number of threads, to the bit.

The codes lie in panels of ROWS rows of the weight, one per lane of a vector, so that nothing is summed across lanes
and a panel is one stream of memory. A panel of some kilobytes stays in the first cache for all rows of x: its codes are
unpacked in registers, for up to MAX_ROWS rows of x at once.

Source: Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008), for panels and tiles.
"""

from __future__ import annotations

from typing import Any

import torch

from llmkit.jit import runtime, tiles
from llmkit.jit import vector as ops
from llmkit.mapped_memory import MappedMemory

GROUP = 32
ROWS = 16  # of the weight in a panel
PAIRS = GROUP // 2
BLOCK_BYTES = {
    4: 16 * ROWS + 4 * ROWS,
    8: 32 * ROWS + 2 * ROWS,
}  # of a group of a panel; scales (and minima) are float16
RECORD = 2 * GROUP + 8  # bytes of a group of a row of x: int16 elements, float32 scale, scale times their sum
LARGEST = 32767.0
CHUNK_BYTES = 512 << 10  # of rounded x that stay in the second cache while panels pass over them
_OWN_ROWS = 2  # of x that every thread rounds for itself: they take less time than a meeting of the threads
_EDGE = 64 * ROWS  # bytes a thread for the tile of a last panel that is not full

LANES = 8  # set by load(), as everything below; constants of the compiled code
MAX_ROWS = 6  # of x in a tile: accumulators of integers and of floats fill the registers
BLOCK_4 = BLOCK_BYTES[4]
BLOCK_8 = BLOCK_BYTES[8]
coded_tile: Any = None
round_rows: Any = None
panel_tile: Any = None
panel_product: Any = None
_kernels: dict[str, Any] = {}


def emit_coded_tile(builder: Any, bits: int, rows: Any, *places: Any) -> None:
    """y[i, :] = x[i, :] w[:, :]^T for `rows` <= MAX_ROWS rows of x and LANES rows w of codes of `bits` (4 or 8).

    places: as in `_emit_tile`, which is emitted for each number of rows.
    """
    for count in range(1, MAX_ROWS + 1):
        with builder.if_then(builder.icmp_signed("==", rows, rows.type(count))):
            _emit_tile(builder, bits, count, *places)


def _emit_tile(
    builder: Any, bits: int, rows: int, x: Any, codes: Any, scales: Any, y: Any, ldy: Any, groups: Any, ahead: Any
) -> None:
    """x: records of `rows` rows, group by group; codes, scales: of the first of LANES rows of the weight, in blocks.

    ldy: bytes between rows of y. Of the memory `ahead` bytes after each block, a block is fetched meanwhile.
    """
    from llvmlite import ir

    lanes, i64, word = ops.LANES, ir.IntType(64), ir.IntType(32)
    words, floats = (ir.VectorType(kind, lanes) for kind in (word, ir.FloatType()))
    half, shorts = ir.VectorType(ir.HalfType(), lanes), ir.VectorType(ir.IntType(16), 2 * lanes)
    fma, block, parts = f"llvm.fma.v{lanes}f32", BLOCK_BYTES[bits], {1: 4, 2: 2, 3: 2}.get(rows, 1)

    def after(address: Any, count: int) -> Any:
        return builder.add(address, ir.Constant(i64, count))

    def splat(kind: Any, address: Any, count: int) -> Any:
        return ops.emit_splat(builder, ops.emit_load(builder, after(address, count), kind.element), kind)

    def body(_index: Any, values: list[Any]) -> list[Any]:
        *totals, left, code, scale = values
        for line in range(0, block, 64):
            ops.emit_prefetch(builder, builder.add(after(code, line), ahead))
        sums = [[ir.Constant(words, [0] * lanes)] * parts for _ in range(rows)]
        for pair, right in enumerate(_unpack(builder, bits, code, shorts)):
            for i, sum_ in enumerate(sums):
                two = builder.bitcast(splat(words, left, RECORD * i + 4 * pair), shorts)
                sum_[pair % parts] = ops.emit_dot_pairs(builder, sum_[pair % parts], right, two)
        factor = builder.fpext(ops.emit_load(builder, scale, half), floats)
        least = builder.fpext(ops.emit_load(builder, after(scale, 2 * ROWS), half), floats) if bits == 4 else None
        for i, (first, *others) in enumerate(sums):
            for other in others:
                first = builder.add(first, other)
            product = builder.fmul(builder.sitofp(first, floats), factor)
            step = splat(floats, left, RECORD * i + 2 * GROUP)
            totals[i] = ops.emit_call(builder, fma, floats, product, step, totals[i])
            if least is not None:
                sum_of_x = splat(floats, left, RECORD * i + 2 * GROUP + 4)
                totals[i] = ops.emit_call(builder, fma, floats, least, sum_of_x, totals[i])
        return [*totals, after(left, RECORD * rows), after(code, block), after(scale, block)]

    zeros = [ir.Constant(floats, [0.0] * lanes)] * rows
    totals = ops.emit_loop(builder, ir.Constant(i64, 0), groups, 1, [*zeros, x, codes, scales], body)
    for total, place in zip(totals, ops.emit_rows(builder, y, ldy, rows), strict=False):
        ops.emit_store(builder, place, total)


def _unpack(builder: Any, bits: int, place: Any, shorts: Any) -> Any:
    """The codes of LANES rows of a block, a pair of neighbours along k at a time, as int16 vectors [LANES, 2]."""
    from llvmlite import ir

    def constant(value: int) -> Any:
        return ir.Constant(shorts, [value] * shorts.count)

    for quad in range(0, 4 * GROUP * bits // 8, 16):  # bytes: each is a word of 4 bytes of each of the ROWS rows
        source = builder.add(place, ir.Constant(ir.IntType(64), ROWS * quad // 4))
        codes = ops.emit_load(builder, source, shorts)
        if bits == 8:
            yield builder.ashr(builder.shl(codes, constant(8)), constant(8))
            yield builder.ashr(codes, constant(8))
        else:
            for shift in (0, 4, 8, 12):
                low = builder.lshr(codes, constant(shift)) if shift else codes
                yield builder.and_(low, constant(15)) if shift < 12 else low


def _round_rows(x: int, rows: int, groups: int, target: int) -> None:
    """Rows of float32 [rows, groups * 32] to records [groups, rows]; a group that is not finite has no finite scale."""
    zero = ops.vsplat(0.0)
    for r in range(rows):
        for g in range(groups):
            source, place = x + 4 * GROUP * (r * groups + g), target + RECORD * (g * rows + r)
            size = total = zero
            for i in range(0, GROUP, LANES):
                value = ops.vload(source + 4 * i)
                size, total = ops.vmax(size, ops.vmax(value, ops.vsub(zero, value))), ops.vadd(total, value)
            top, sum_of_all = ops.vtop(size), ops.vsum(total)
            inverse = ops.vsplat(LARGEST / top if top > 1e-30 else 0.0)
            total = zero
            for i in range(0, GROUP, LANES):
                code = ops.vround(ops.vmul(ops.vload(source + 4 * i), inverse))
                ops.vstore_int16(place + 2 * i, code)
                total = ops.vadd(total, code)
            scale = top / LARGEST + (sum_of_all - sum_of_all)
            ops.sstore(place + 2 * GROUP, scale)
            ops.sstore(place + 2 * GROUP + 4, scale * ops.vsum(total))


def _round_kernel(args: Any) -> None:
    """args: tickets, x, target, m, groups, rows of x a chunk."""
    x, target, m, groups, chunk = args[1], args[2], args[3], args[4], args[5]
    most = (chunk + MAX_ROWS - 1) // MAX_ROWS
    item = ops.take(args, 0)
    while item < (m + chunk - 1) // chunk * most:
        first, part = item // most * chunk, item % most
        rows = min(chunk, m - first)
        parts = (rows + MAX_ROWS - 1) // MAX_ROWS
        if part < parts:
            start, stop = first + rows * part // parts, first + rows * (part + 1) // parts
            round_rows(x + 4 * GROUP * groups * start, stop - start, groups, target + RECORD * groups * start)
        item = ops.take(args, 0)


def _panel_tile(bits: int, rows: int, x: int, panel: int, y: int, ldy: int, groups: int, ahead: int) -> None:
    """`rows` rows of x times a panel."""
    for lane in range(0, ROWS, LANES):
        codes = panel + 4 * lane
        if bits == 4:
            coded_tile(4, rows, x, codes, panel + 16 * ROWS + 2 * lane, y + 4 * lane, ldy, groups, ahead)
        else:
            coded_tile(8, rows, x, codes, panel + 32 * ROWS + 2 * lane, y + 4 * lane, ldy, groups, ahead)


def _panel_product(
    bits: int, x: int, rows: int, panel: int, y: int, ldy: int, columns: int, groups: int, bias: int, ahead: int,
    edge: int,
) -> None:  # fmt: skip
    """A chunk of rows of x times a panel of which `columns` rows exist; edge: scratch for one that is not full."""
    parts = (rows + MAX_ROWS - 1) // MAX_ROWS
    for part in range(parts):
        start, stop = rows * part // parts, rows * (part + 1) // parts
        left, place, gap = x + RECORD * groups * start, y + ldy * start, ldy
        if columns < ROWS:
            place, gap = edge, 4 * ROWS
        panel_tile(bits, stop - start, left, panel, place, gap, groups, ahead if part == 0 else 0)
        if columns < ROWS:
            for i in range(stop - start):
                for j in range(columns):
                    ops.sstore(y + ldy * (start + i) + 4 * j, ops.sload(edge + 4 * (ROWS * i + j)))
    if bias != 0:
        for i in range(rows):
            for j in range(columns):
                ops.sstore(y + ldy * i + 4 * j, ops.sload(y + ldy * i + 4 * j) + ops.sload(bias + 4 * j))


def _product_kernel(args: Any) -> None:
    """args: tickets, bits, x, weight, bias (0: none), y, m, n, groups, rows of x a chunk, panels an item, threads,
    whether x is yet to be rounded, scratch, its bytes a thread, tickets. An item is some panels for a chunk of x.
    """
    bits, x, weight, bias, y, m, n, groups, chunk, some, threads = (
        args[1], args[2], args[3], args[4], args[5], args[6], args[7], args[8], args[9], args[10], args[11],
    )  # fmt: skip
    edge = args[13] + args[14] * ops.take(args, 15)
    if args[12] != 0:
        round_rows(x, m, groups, edge + _EDGE)
        x = edge + _EDGE
    size = groups * (BLOCK_4 if bits == 4 else BLOCK_8)
    panels = (n + ROWS - 1) // ROWS
    items = (panels + some - 1) // some
    item = ops.take(args, 0)
    while item < (m + chunk - 1) // chunk * items:
        first, start = item // items * chunk, item % items * some
        for p in range(start, min(start + some, panels)):
            column = ROWS * p
            panel_product(
                bits, x + RECORD * groups * first, min(chunk, m - first), weight + size * p,
                y + 4 * (n * first + column), 4 * n, min(ROWS, n - column), groups,
                0 if bias == 0 else bias + 4 * column, size * some * threads, edge,
            )  # fmt: skip
        item = ops.take(args, 0)


def load() -> None:
    """Compile or load the kernels."""
    global LANES, MAX_ROWS, coded_tile, round_rows, panel_tile, panel_product
    if not _kernels:
        runtime.load()
        LANES, MAX_ROWS = ops.LANES, 12 if ops.LANES == 16 else 6
        coded_tile = tiles.tile_operation(8, emit_coded_tile, 1)
        round_rows, panel_tile = runtime.inner(_round_rows), runtime.inner(_panel_tile)
        panel_product = runtime.inner(_panel_product)
        _kernels.update(round=runtime.compile_kernel(_round_kernel), product=runtime.compile_kernel(_product_kernel))


def empty_panels(n: int, groups: int, bits: int, memory: MappedMemory) -> torch.Tensor:
    """Memory for a weight of n rows, uint8 [panels, groups, bytes of a block]; rows that a panel lacks are zeros."""
    panels = memory.empty((-(-n // ROWS), groups, BLOCK_BYTES[bits]), torch.uint8)
    if n % ROWS:
        panels[-1].zero_()
    return panels


def linear(x: torch.Tensor, panels: torch.Tensor, bits: int, n: int, bias: torch.Tensor | None) -> torch.Tensor:
    """x[m, k] w[n, k]^T + bias -> [m, n]; x and bias float32, x contiguous, k whole groups."""
    if not _kernels:
        load()
    m, groups = x.shape[0], panels.shape[1]
    y = runtime.empty((m, n))
    threads = torch.get_num_threads() if m * n * groups > 2048 else 1
    own = m <= _OWN_ROWS
    record = RECORD * groups
    chunk = max(1, CHUNK_BYTES // (record * MAX_ROWS)) * MAX_ROWS
    size = (_EDGE + (record * m if own else 0) + 127) & -64
    scratch = runtime.scratch_address(threads * size + (0 if own else record * m))
    some = min(4, max(1, len(panels) // (8 * threads)))
    source = x.data_ptr()
    if not own:
        source = scratch + threads * size
        runtime.launch(
            _kernels["round"], threads if m > MAX_ROWS else 1, x.data_ptr(), source, m, groups, min(chunk, m)
        )
    runtime.launch(
        _kernels["product"], threads, bits, source, panels.data_ptr(), 0 if bias is None else bias.data_ptr(),
        y.data_ptr(), m, n, groups, chunk, some, threads, int(own), scratch, size, 0,
    )  # fmt: skip
    return y
