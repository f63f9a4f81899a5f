"""Float32 linear layers for CPUs on weights that are stored in panels (`llmkit.jit.panels`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from llmkit.jit import panels, runtime
from llmkit.jit import vector as ops
from llmkit.mapped_memory import MappedMemory

WIDTH = 16  # set by load(), as everything below; constants of the compiled code
VECTORS = 2
HALF = 1
MAX_ROWS = 6
STREAMS = 4
LINES = 1
FIRST_LINES = 1
add_bias: Any = None
_kernels: dict[str, Any] = {}


@dataclass(frozen=True)
class PanelWeight:
    """A weight [n, k] as `data` float32 [n / WIDTH, k, WIDTH]."""

    data: torch.Tensor
    shape: tuple[int, int]


def _add_bias(y: int, ldy: int, rows: int, columns: int, bias: int) -> None:
    for i in range(rows):
        for j in range(0, 4 * columns, 4 * ops.LANES):
            place = y + i * ldy + j
            ops.vstore(place, ops.vadd(ops.vload(place), ops.vload(bias + j)))


def _many_rows_kernel(args: Any) -> None:
    """args: tickets, x, weight, bias (0: none), y, m, n, k, threads, rows of x at a time.

    Work items are panels for a chunk of rows. Panels that do not divide evenly among the threads are dealt out in
    halves.
    """
    x, w, bias, y, m, n, k, threads, chunk = (
        args[1], args[2], args[3], args[4], args[5], args[6], args[7], args[8], args[9],
    )  # fmt: skip
    count, size, wide = n // WIDTH, 4 * WIDTH * k, 4 * n
    whole = count // threads * threads
    items = whole + 2 * (count - whole)
    total = items * ((m + chunk - 1) // chunk)
    item = ops.take(args, 0)
    while item < total:
        first, place = item // items * chunk, item % items
        rows, half, columns, offset = min(chunk, m - first), 0, WIDTH, 0
        panel = place
        if place >= whole:
            panel, half, columns = whole + (place - whole) // 2, 1, HALF * ops.LANES
            offset = 4 * columns * ((place - whole) & 1)
        b = w + panel * size + offset
        out = y + first * wide + 4 * WIDTH * panel + offset
        parts = (rows + MAX_ROWS - 1) // MAX_ROWS
        r = 0
        for part in range(parts):
            step = (rows - r) // (parts - part)
            left, target = x + 4 * k * (first + r), out + wide * r
            if half == 1 or parts == 1:
                panels.only_tile(step, half, left, 4 * k, b, target, wide, k, size * threads if part == 0 else 0)
            else:
                ahead = size * threads + 64 * FIRST_LINES * part if part * FIRST_LINES < LINES else 0
                panels.one_of_tiles(step, left, 4 * k, b, target, wide, k, ahead)
            r += step
        if bias != 0:
            add_bias(out, wide, rows, columns, bias + 4 * WIDTH * panel + offset)
        item = ops.take(args, 0)


def _single_row_kernel(args: Any) -> None:
    """args as those of `_many_rows_kernel`, m = 1. An item is STREAMS panels that are far apart, or half a panel."""
    x, w, bias, y, n, k, threads = args[1], args[2], args[3], args[4], args[6], args[7], args[8]
    count, size = n // WIDTH, 4 * WIDTH * k
    groups = count // (STREAMS * threads) * threads
    rest = STREAMS * groups
    item = ops.take(args, 0)
    while item < groups + 2 * (count - rest):
        if item < groups:
            panels.row_tile(
                STREAMS, VECTORS, x, w + item * size, groups * size, y + 4 * WIDTH * item, 4 * WIDTH * groups, k
            )
            if bias != 0:
                for i in range(item, rest, groups):
                    add_bias(y + 4 * WIDTH * i, 0, 1, WIDTH, bias + 4 * WIDTH * i)
        else:
            panel, columns = rest + (item - groups) // 2, HALF * ops.LANES
            offset = 4 * columns * ((item - groups) & 1)
            out = y + 4 * WIDTH * panel + offset
            panels.row_tile(1, HALF, x, w + panel * size + offset, 0, out, 0, k)
            if bias != 0:
                add_bias(out, 0, 1, columns, bias + 4 * WIDTH * panel + offset)
        item = ops.take(args, 0)


def load() -> dict[str, Any]:
    """Compile or load the kernels of this module."""
    global WIDTH, VECTORS, HALF, MAX_ROWS, STREAMS, LINES, FIRST_LINES, add_bias
    if not _kernels:
        runtime.load()
        WIDTH, VECTORS, HALF = panels.WIDTH, panels.VECTORS, panels.HALF
        MAX_ROWS, STREAMS, LINES, FIRST_LINES = panels.MAX_ROWS, panels.STREAMS, panels.LINES, panels.FIRST_LINES
        add_bias = runtime.inner(_add_bias)
        many = runtime.compile_kernel(_many_rows_kernel)
        _kernels.update(single=runtime.compile_kernel(_single_row_kernel), many=many)
    return _kernels


def pack(weight: torch.Tensor, memory: MappedMemory) -> PanelWeight | None:
    """`weight` [n, k] in panels; None if it is not float32 on the CPU or its sizes do not suit."""
    n, k = weight.shape
    if weight.dtype is not torch.float32 or weight.device.type != "cpu" or k % panels.UNROLL:
        return None
    load()
    if n % WIDTH or not n:
        return None
    data = memory.empty((n // WIDTH, k, WIDTH))
    data.copy_(weight.view(n // WIDTH, WIDTH, k).transpose(1, 2))
    return PanelWeight(data, (n, k))


def linear(x: torch.Tensor, weight: PanelWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x float32 [m, k] weight[n, k]^T + bias float32 [n] → [m, n]; relative error below 1e-5 for k of thousands."""
    m, (n, k) = x.shape[0], weight.shape
    x = x.contiguous()
    y = runtime.empty((m, n))
    threads = torch.get_num_threads() if m * n * k > 65536 else 1
    chunk = max(1, panels.CHUNK_BYTES // (4 * k * MAX_ROWS)) * MAX_ROWS
    runtime.launch(
        _kernels["single" if m == 1 else "many"], threads, x.data_ptr(), weight.data.data_ptr(),
        0 if bias is None else bias.data_ptr(), y.data_ptr(), m, n, k, threads, chunk,
    )  # fmt: skip
    return y
