"""Float32 linear layers for CPUs: near memory bandwidth for one row, register tiles for some, oneDNN for many."""

from __future__ import annotations

from typing import Any

import torch

from llmkit.jit import runtime, tiles
from llmkit.jit import vector as ops

STREAMS = 4  # runs of rows that one thread reads at once when x is a single row
PIECE = 16  # rows of a run taken at a time
MAX_SMALL_ROWS = 64  # above this the matrix product of oneDNN is faster than tiles on the unpacked weight

one_row: Any = None  # `_single_row` for use inside kernels, bound by `load`
_kernel: Any = None
_single: Any = None


def _linear_kernel(args: Any) -> None:
    """args: tickets, x, weight, bias (0: none), y, m, n, k, rows a piece, threads, rows a share, a counter a share.

    A thread walks through its own share of the rows, so that it reads memory in order, then helps with the
    others'.
    """
    x, w, bias, y, m, n, k, piece = args[1], args[2], args[3], args[4], args[5], args[6], args[7], args[8]
    threads, share = args[9], args[10]
    ticket = ops.take(args, 0)
    for turn in range(threads):
        part = (ticket + turn) % threads
        low = part * share
        high = min(low + share, n)
        while True:
            start = low + ops.take(args, 11 + part) * piece
            if start >= high:
                break
            count = min(piece, high - start)
            tiles.rows_times_weight(x, 4 * k, m, w + 4 * k * start, 4 * k, count, y + 4 * start, 4 * n, k)
            if bias != 0:
                for i in range(m):
                    for j in range(start, start + count):
                        place = y + 4 * (i * n + j)
                        ops.sstore(place, ops.sload(place) + ops.sload(bias + 4 * j))


def _single_row(
    x: int, w: int, bias: int, y: int, n: int, k: int, low: int, stride: int, start: int, stop: int
) -> None:
    """One row of x times rows low + [start, stop) of w and those 1 .. STREAMS - 1 strides on: STREAMS streams."""
    for j in range(low + start, low + stop):
        if j + (STREAMS - 1) * stride < n:
            tiles.dot_tile(STREAMS, 1, w + 4 * k * j, 4 * k * stride, x, 0, y + 4 * j, 4 * stride, k, 0)
        else:
            for i in range(j, n, stride):
                tiles.dot_tile(1, 1, w + 4 * k * i, 0, x, 0, y + 4 * i, 0, k, 0)
        if bias != 0:
            for i in range(j, min(n, j + STREAMS * stride), stride):
                ops.sstore(y + 4 * i, ops.sload(y + 4 * i) + ops.sload(bias + 4 * i))


def _single_kernel(args: Any) -> None:
    """args as those of `_linear_kernel` with m = 1; a share is STREAMS runs of `share` rows."""
    x, w, bias, y, n, k, piece = args[1], args[2], args[3], args[4], args[6], args[7], args[8]
    threads, share = args[9], args[10]
    ticket = ops.take(args, 0)
    for turn in range(threads):
        part = (ticket + turn) % threads
        while True:
            start = ops.take(args, 11 + part) * piece
            if start >= share:
                break
            one_row(x, w, bias, y, n, k, part * STREAMS * share, share, start, min(start + piece, share))


def load() -> None:
    """Compile or load the kernels of `linear`."""
    global _kernel, _single, one_row
    if _kernel is None:
        one_row = runtime.inner(_single_row)
        _single = runtime.compile_kernel(_single_kernel)
        _kernel = runtime.compile_kernel(_linear_kernel)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x[m, k] weight[n, k]^T + bias[n] -> [m, n].

    float32 and contiguous operands take the tiles for m <= MAX_SMALL_ROWS and oneDNN's product above;
    anything else is `torch.nn.functional.linear`. Relative error against the float64 product is below 1e-5
    for k up to some thousands.
    """
    m, n, k = x.shape[0], weight.shape[0], weight.shape[1]
    if x.dtype is not torch.float32 or weight.dtype is not torch.float32 or not weight.is_contiguous():
        return torch.nn.functional.linear(x, weight, bias)
    if m > MAX_SMALL_ROWS:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    x = x.contiguous()
    y = runtime.empty((m, n))
    threads = torch.get_num_threads() if m * n * k > 65536 else 1
    if _kernel is None:
        load()
    if m == 1:
        share, piece = -(-n // (threads * STREAMS)), PIECE
    else:
        share, piece = (n // threads + 4) & -4, 16
    runtime.launch(
        _single if m == 1 else _kernel, threads, x.data_ptr(), weight.data_ptr(),
        0 if bias is None else bias.data_ptr(), y.data_ptr(), m, n, k, piece, threads, share, *((0,) * threads),
    )  # fmt: skip
    return y
