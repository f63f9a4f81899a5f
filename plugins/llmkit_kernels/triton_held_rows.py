"""Products of a few rows with a weight that the registers of the whole GPU can hold: all of it is on its way before the
kernel ahead has ended.

A program has 16 rows of the weight, all of whose numbers its threads load before they wait (`llmkit.jit.chain`), each
thread those that it multiplies: nothing is exchanged between threads but sums. Its warps share the columns out among
themselves. A thread loads eight numbers of a row at once; the matrix units want others beside each other, which is
only a name: columns may be added up in any order, as long as rows of the batch have the same.

The next kernel may start once this one has waited: the weights that it loads must not come ahead of what this one, or
attention ahead of it, is waiting for.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from llmkit.jit.chain import INTERPRETED, follows_early, next_may_start, wait_for_last
from llmkit.jit.device import device_of
from llmkit.jit.few_rows import Norm, silu_and_mul
from llmkit.jit.rehearsal import launch

_LEAST_COLUMNS = 1024  # smaller weights have not been measured
_LEAST_SHARE = 30_000  # bytes of the weight for each multiprocessor
# As measured on an H200; more columns or bytes gain nothing. fused: with a norm or SiLU.
_MOST_COLUMNS, _MOST_SHARE = 3072, 50_000
_MOST_COLUMNS_FUSED, _MOST_SHARE_FUSED = 1024, 100_000


@triton.jit
def _weight_in_order(loaded, PARTS: tl.constexpr, STEPS: tl.constexpr):
    """[8, PARTS, STEPS, 2, 32] as loaded → [PARTS, 16, STEPS * 32], columns as the matrix units find them."""
    cells = tl.reshape(loaded, (8, PARTS, STEPS, 2, 4, 4, 2))
    return tl.reshape(tl.permute(cells, (1, 3, 0, 2, 5, 4, 6)), (PARTS, 16, STEPS * 32))


@triton.jit
def _rows_in_order(loaded, PARTS: tl.constexpr, STEPS: tl.constexpr):
    """[8, PARTS, STEPS, 32] as loaded → [PARTS, STEPS * 32, 8], columns in the same order."""
    cells = tl.reshape(loaded, (8, PARTS, STEPS, 4, 4, 2))
    return tl.reshape(tl.permute(cells, (1, 2, 4, 3, 5, 0)), (PARTS, STEPS * 32, 8))


@triton.jit
def _weight(
    weight_ptr, first, column, N: tl.constexpr, K: tl.constexpr, CHUNKS: tl.constexpr, SPAN: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """16 rows of the weight from `first`, or, GATED, 8 and those N behind them: CHUNKS of [8, PARTS, STEPS, 2, 32]."""
    second: tl.constexpr = N if GATED else 8
    row = first + tl.arange(0, 8)[:, None] + tl.arange(0, 2)[None, :] * second
    if N % (8 if GATED else 16) != 0:
        row = tl.minimum(row, 2 * N - 1 if GATED else N - 1)
    cell = weight_ptr + ((row * K)[:, None, None, :, None] + column[None, :, :, None, :])
    chunks = ()
    for chunk in tl.static_range(CHUNKS):
        if column.shape[0] * CHUNKS * SPAN == K:
            loaded = tl.load(cell + chunk * SPAN)
        else:
            loaded = tl.load(cell + chunk * SPAN, mask=(column + chunk * SPAN < K)[None, :, :, None, :], other=0.0)
        chunks = chunks + (loaded,)  # noqa: RUF005  # the compiler does not know `*`
    return chunks


@triton.jit
def _rows(ptr, rows, column, K: tl.constexpr, CHUNKS: tl.constexpr, SPAN: tl.constexpr):
    """All columns of `rows` rows of the batch: CHUNKS of [8, PARTS, STEPS, 32]."""
    row = tl.arange(0, 8)[:, None, None, None]
    chunks = ()
    for chunk in tl.static_range(CHUNKS):
        there = row < rows
        if column.shape[0] * CHUNKS * SPAN != K:
            there = there & (column + chunk * SPAN < K)[None, :, :, :]
        loaded = tl.load(ptr + (row * K + column[None, :, :, :]) + chunk * SPAN, mask=there, other=0.0)
        chunks = chunks + (loaded,)  # noqa: RUF005
    return chunks


@triton.jit
def _columns(ptr, column, K: tl.constexpr, CHUNKS: tl.constexpr, SPAN: tl.constexpr):
    """Numbers of all columns: CHUNKS of [PARTS, STEPS, 32]."""
    chunks = ()
    for chunk in tl.static_range(CHUNKS):
        if column.shape[0] * CHUNKS * SPAN == K:
            loaded = tl.load(ptr + (chunk * SPAN + column))
        else:
            loaded = tl.load(ptr + (chunk * SPAN + column), mask=column + chunk * SPAN < K, other=0.0)
        chunks = chunks + (loaded,)  # noqa: RUF005
    return chunks


@triton.jit
def _added(
    xs, residuals, scales, total_ptr, rows, eps, column, K: tl.constexpr, CHUNKS: tl.constexpr, SPAN: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Sums of x and residual, written to total by one program each row, times the norm's weight; and the rest of the
    norm, a factor of each row [8]."""
    row = tl.arange(0, 8)
    mine = ((row < rows) & (row % tl.num_programs(0) == tl.program_id(0)))[:, None, None, None]
    even: tl.constexpr = column.shape[0] * CHUNKS * SPAN == K
    squares = tl.zeros((8, PARTS), tl.float32)
    weighted = ()
    place = row[:, None, None, None] * K + column[None, :, :, :]
    for chunk in tl.static_range(CHUNKS):
        total = (xs[chunk].to(tl.float32) + residuals[chunk].to(tl.float32)).to(xs[chunk].dtype)
        if even:
            tl.store(total_ptr + place + chunk * SPAN, total, mask=mine)
        else:
            tl.store(total_ptr + place + chunk * SPAN, total, mask=mine & (column + chunk * SPAN < K)[None, :, :, :])
        wide = total.to(tl.float32)
        squares += tl.sum(tl.sum(wide * wide, 3), 2)
        weighted = weighted + ((wide * scales[chunk].to(tl.float32)[None, :, :, :]).to(total.dtype),)  # noqa: RUF005
    return weighted, 1.0 / tl.sqrt_rn(tl.sum(squares, 1) / K + eps)


@triton.jit
def _store(
    acc, factor, out_ptr, bias_ptr, first, rows, N: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr,
    BIASED: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """acc float32 [PARTS, 16, 8], added up, times factor [8] where NORMED, to out. With a dimension more than needed
    threads exchange less."""
    result = tl.sum(acc[:, :, :, None], 0)
    if NORMED:
        result *= factor[None, :, None]
    if GATED:
        halves = tl.reshape(result.to(TYPE).to(tl.float32), (2, 8, 8, 1))
        gate, up = tl.split(tl.permute(halves, (1, 2, 3, 0)))
        result = silu_and_mul(gate, up, TYPE)
    result = tl.permute(result, (2, 0, 1))
    row = (first + tl.arange(0, 8 if GATED else 16))[None, :, None]
    token = tl.arange(0, 8)[None, None, :]
    if BIASED:
        result += tl.load(bias_ptr + row, mask=row < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * N + row, result.to(out_ptr.dtype.element_ty), mask=(row < N) & (token < rows))


@triton.jit(do_not_specialize=["rows"])
def held_rows_kernel(
    x_ptr, residual_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, total_ptr, rows, eps,
    N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, STEPS: tl.constexpr, CHUNKS: tl.constexpr,
    NORMED: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, COMPUTE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x, residual, total [rows, K], weight [N, K] or, GATED, [2 * N, K], out [rows, N], all dense; rows <= 8.

    NORMED: x + residual goes to total, and the product is with its norm. GATED: out is SiLU of the product with the
    weight's first half, times that with its second. K <= PARTS * CHUNKS * STEPS * 32. EARLY: see `llmkit.jit.chain`.
    """
    own: tl.constexpr = 8 if GATED else 16
    span: tl.constexpr = STEPS * 32
    first = tl.program_id(0) * own
    part = tl.arange(0, PARTS)[:, None, None] * (CHUNKS * span)
    column = part + tl.arange(0, STEPS)[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    held = _weight(weight_ptr, first, column, N, K, CHUNKS, span, GATED)
    if NORMED:
        scales = _columns(norm_ptr, column, K, CHUNKS, span)
    if EARLY:
        wait_for_last()
        if NORMED:
            next_may_start()
    xs = _rows(x_ptr, rows, column, K, CHUNKS, span)
    if NORMED:
        residuals = _rows(residual_ptr, rows, column, K, CHUNKS, span)
    if EARLY and not NORMED:
        next_may_start()  # not before: what it loads would come ahead of the rows
    if NORMED:
        xs, factor = _added(xs, residuals, scales, total_ptr, rows, eps, column, K, CHUNKS, span, PARTS)
    acc = tl.zeros((PARTS, 16, 8), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        weight = _weight_in_order(held[chunk], PARTS, STEPS).to(COMPUTE)
        acc = tl.dot(weight, _rows_in_order(xs[chunk], PARTS, STEPS).to(COMPUTE), acc, input_precision="ieee")
    if not NORMED:
        factor = 1.0
    _store(acc, factor, out_ptr, bias_ptr, first, rows, N, NORMED, GATED, BIASED, x_ptr.dtype.element_ty)


def takes(weight: torch.Tensor, *, fused: bool) -> bool:
    """Whether the kernel pays for a weight [n, k] for which that of few rows does. fused: with a norm or SiLU."""
    most_columns, most = (_MOST_COLUMNS_FUSED, _MOST_SHARE_FUSED) if fused else (_MOST_COLUMNS, _MOST_SHARE)
    processors = device_of(weight.device).processors
    return (
        follows_early(weight.device)
        and _LEAST_COLUMNS <= weight.shape[1] <= most_columns
        and _LEAST_SHARE * processors <= weight.nbytes <= most * processors
    )


def launch_held_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    gated: bool = False,
) -> None:
    """As `llmkit.jit.few_rows.launch_few_rows`."""
    (rows, k), n = x.shape, out.shape[1]
    warps = 4 if k <= 1024 else 8
    groups = triton.cdiv(k, warps * 32)
    steps = next(each for each in (8, 4) if each == 4 or groups % each == 0)
    early = follows_early(x.device)
    options: dict[str, Any] = {"launch_pdl": True} if early else {}
    launch(
        held_rows_kernel, (triton.cdiv(n, 8 if gated else 16),),
        x, x if norm is None else norm.residual, x if norm is None else norm.weight, weight,
        x if bias is None else bias, out, x if norm is None else norm.total, rows, 0.0 if norm is None else norm.eps,
        N=n, K=k, PARTS=warps, STEPS=steps, CHUNKS=triton.cdiv(groups, steps),
        NORMED=norm is not None, GATED=gated, BIASED=bias is not None,
        COMPUTE=tl.float32 if INTERPRETED else tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16,
        EARLY=early, num_warps=warps, **options,
    )  # fmt: skip
