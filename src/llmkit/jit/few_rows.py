"""Products of a few rows with a weight, in full precision or in float8, which take as long as reading it, or as long as
a kernel takes at all: so what stands before and behind the product is done in the same launch. Needs Triton.

A program has some rows of the weight and all rows of the batch. Its warps share the columns out among themselves, each
with a chain of products of its own, and their results are added up at the end. On GPUs that can start a kernel before
the one ahead of it has ended (`chain`), small weights are asked for before the kernel waits: no kernel writes weights.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from llmkit.jit.chain import INTERPRETED, LINE, ask_for, follows_early, next_may_start, wait_for_last
from llmkit.jit.device import device_of
from llmkit.jit.float8 import widened
from llmkit.jit.rehearsal import launch

MOST_ROWS = 8
_LARGEST_ASKED = 40 * 2**20  # what stays in the cache that all multiprocessors share until it is wanted


@dataclass(frozen=True)
class Block:
    """How one program works: rows of the weight, columns at a time, warps, loads under way as Triton counts them."""

    rows: int
    columns: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Norm:
    """x is added to residual [t, k], which goes to total [t, k]; what is multiplied is the norm of the sum, of weight
    [k]."""

    residual: torch.Tensor
    weight: torch.Tensor
    eps: float
    total: torch.Tensor


@triton.jit  # type: ignore[untyped-decorator]
def silu_of_half(  # type: ignore[no-untyped-def]
    result, OWN: tl.constexpr, BLOCK_M: tl.constexpr, TYPE: tl.constexpr
):
    """SiLU of the first OWN of 2 * OWN rows, times the others: float32 [OWN, BLOCK_M]."""
    halves = tl.reshape(result.to(TYPE).to(tl.float32), (2, OWN, BLOCK_M))
    gate, up = tl.split(tl.permute(halves, (1, 2, 0)))
    return silu_and_mul(gate, up, TYPE)


@triton.jit  # type: ignore[untyped-decorator]
def silu_of_pairs(  # type: ignore[no-untyped-def]
    result, OWN: tl.constexpr, BLOCK_M: tl.constexpr, TYPE: tl.constexpr
):
    """SiLU of the first of every two of 2 * OWN rows, times the second: float32 [OWN, BLOCK_M]."""
    pairs = tl.reshape(result.to(TYPE).to(tl.float32), (OWN, 2, BLOCK_M))
    gate, up = tl.split(tl.permute(pairs, (0, 2, 1)))
    return silu_and_mul(gate, up, TYPE)


@triton.jit  # type: ignore[untyped-decorator]
def silu_and_mul(  # type: ignore[no-untyped-def]
    gate, up, TYPE: tl.constexpr
):
    """SiLU of gate times up, rounded to TYPE where the reference rounds; both float32."""
    return (gate / (1.0 + tl.exp(-gate))).to(TYPE).to(tl.float32) * up


@triton.jit  # type: ignore[untyped-decorator]
def store_columns(  # type: ignore[no-untyped-def]
    result, out_ptr, bias_ptr, out_row, token, rows, n,
    BIASED: tl.constexpr,
):  # fmt: skip
    """result float32 [out_row, token] to out [rows, n], with the bias."""
    if BIASED:
        result += tl.load(bias_ptr + out_row, mask=out_row < n, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + (token * n)[None, :] + out_row[:, None]
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=(out_row < n)[:, None] & (token < rows)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _ask_for_rows(  # type: ignore[no-untyped-def]
    weight_ptr, row, k, BLOCK_K: tl.constexpr
):
    """Have rows brought to the cache that all multiprocessors share."""
    line_size: tl.constexpr = LINE * 8 // weight_ptr.dtype.element_ty.primitive_bitwidth
    for first in range(0, k, BLOCK_K):
        line = tl.minimum(first + tl.arange(0, BLOCK_K // line_size) * line_size, k - 1)
        ask_for(weight_ptr + (row[:, None] + line[None, :]))


@triton.jit  # type: ignore[untyped-decorator]
def _added(  # type: ignore[no-untyped-def]
    x, residual_ptr, norm_ptr, total_ptr, start, place, column,
    there, mine, k, EVEN: tl.constexpr,
):  # fmt: skip
    """x and residual added up, to total where it is `mine`, times the norm's weight; and the sum of squares of each
    part: the rest of the norm is a factor of the row."""
    residual = tl.load(residual_ptr + start + place, mask=there, other=0.0)
    total = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(total_ptr + start + place, total, mask=there & mine)
    wide = total.to(tl.float32)
    squares = tl.sum(wide * wide, 1)
    if EVEN:
        scale = tl.load(norm_ptr + start + column)
    else:
        scale = tl.load(norm_ptr + start + column, mask=start + column < k, other=0.0)
    return (wide * scale.to(tl.float32)[:, :, None]).to(x.dtype), squares


@triton.jit  # type: ignore[untyped-decorator]
def few_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, norm_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, total_ptr, rows, n, k, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr,
    LARGE: tl.constexpr, COMPUTE: tl.constexpr, EARLY: tl.constexpr, ASKS: tl.constexpr,
):  # fmt: skip
    """x, residual, total [rows, k], weight [n, k] or, GATED, [2 * n, k], out [rows, n], all dense; rows <= BLOCK_M.

    NORMED: x + residual goes to total, and the product is with its norm. GATED: out is SiLU of the product with the
    weight's first half, times that with its second. SCALED: each row of the weight has a scale, float32. LARGE: it has
    2**31 numbers or more. EVEN: k is a multiple of BLOCK_K. PARTS: warps. EARLY: see `chain`; ASKS: then the weight is
    asked for first.
    """
    own: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    first = tl.program_id(0) * own
    lane = tl.arange(0, BLOCK_N)
    if GATED:
        weight_row = tl.minimum(first + lane % own, n - 1) + lane // own * n
    else:
        weight_row = tl.minimum(first + lane, n - 1)
    if SCALED:
        row_scale = tl.load(scale_ptr + weight_row)
    if LARGE:
        weight_row = weight_row.to(tl.int64)
    weight_row *= k
    if EARLY:
        if ASKS:
            _ask_for_rows(weight_ptr, weight_row, k, BLOCK_K)
        next_may_start()
        wait_for_last()
    column = tl.arange(0, PARTS)[:, None] * (BLOCK_K // PARTS) + tl.arange(0, BLOCK_K // PARTS)[None, :]
    token = tl.arange(0, BLOCK_M)
    acc = tl.zeros((PARTS, BLOCK_N, BLOCK_M), tl.float32)
    squares = tl.zeros((PARTS, BLOCK_M), tl.float32)
    weight_cell = weight_ptr + (weight_row[None, :, None] + column[:, None, :])
    place = column[:, :, None] + (token * k)[None, None, :]
    for start in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        there = (token < rows)[None, None, :]
        if EVEN:
            weight = tl.load(weight_cell + start)
        else:
            there = there & (start + column < k)[:, :, None]
            weight = tl.load(weight_cell + start, mask=(start + column < k)[:, None, :], other=0.0)
        x = tl.load(x_ptr + start + place, mask=there, other=0.0)
        if NORMED:
            mine = (first + token == token)[None, None, :]
            x, more = _added(x, residual_ptr, norm_ptr, total_ptr, start, place, column, there, mine, k, EVEN)
            squares += more
        acc = tl.dot(widened(weight, COMPUTE), x.to(COMPUTE), acc, input_precision="ieee")
    result = tl.sum(acc, 0)
    if SCALED:
        result *= row_scale[:, None]
    if NORMED:
        result *= (1.0 / tl.sqrt_rn(tl.sum(squares, 0) / k + eps))[None, :]
    if GATED:
        result = silu_of_half(result, own, BLOCK_M, x_ptr.dtype.element_ty)
    store_columns(result, out_ptr, bias_ptr, first + tl.arange(0, own), token, rows, n, BIASED)


def fits(x: torch.Tensor) -> bool:
    """Whether x [t, k] is what the kernel takes."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and x.dim() == 2
        and 0 < x.shape[0] <= MOST_ROWS
        and x.is_contiguous()
    )


def launch_few_rows(
    block: Block,
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    gated: bool = False,
) -> None:
    """x [t, k] for which `fits` holds, times weight [n, k], whose rows have `scales` [n], and bias [n] to out [t, n];
    gated: `silu_and_mul` of the product, [t, n / 2], without bias. All dense."""
    (rows, k), n = x.shape, out.shape[1]
    early = follows_early(x.device)
    options: dict[str, Any] = {"launch_pdl": True} if early else {}
    block = fitted(block, weight.element_size(), norm is not None, device_of(x.device).shared_memory)
    launch(
        few_rows_kernel, (triton.cdiv(n, block.rows // 2 if gated else block.rows),),
        x, x if norm is None else norm.residual, x if norm is None else norm.weight, weight,
        x if scales is None else scales, x if bias is None else bias, out, x if norm is None else norm.total,
        rows, n, k, 0.0 if norm is None else norm.eps,
        BLOCK_M=MOST_ROWS, BLOCK_N=block.rows, BLOCK_K=block.columns, PARTS=block.warps, STAGES=block.stages,
        EVEN=k % block.columns == 0, NORMED=norm is not None, GATED=gated, BIASED=bias is not None,
        SCALED=scales is not None, LARGE=weight.numel() >= 2**31,
        COMPUTE=tl.float32 if INTERPRETED else tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16,
        EARLY=early, ASKS=early and weight.nbytes <= _LARGEST_ASKED and norm is None,
        num_warps=block.warps, num_stages=block.stages, **options,
    )  # fmt: skip


@functools.cache
def fitted(block: Block, element_size: int, normed: bool, shared_memory: int) -> Block:
    """With as many stages as there is shared memory for: weight and rows, with a norm residual and weight too."""
    row_bytes = block.rows * element_size + 2 * (2 * MOST_ROWS + 1 if normed else MOST_ROWS)
    most = shared_memory // (row_bytes * block.columns) + 1
    return replace(block, stages=max(2, min(block.stages, most)))
