"""Products of a few rows with a weight, which take as long as reading it, or as long as a kernel takes at all: so what
stands before and behind the product is done in the same launch.

A program has BLOCK_N rows of the weight and all rows of the batch. Its warps share the columns out among themselves,
each with a chain of products of its own, and their results are added up at the end. On GPUs that can start a kernel
before the one ahead of it has ended (`triton_chain`), small weights are asked for before the kernel waits: no kernel
writes weights.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from llmkit.jit.rehearsal import launch
from llmkit_kernels.triton_chain import INTERPRETED, follows_early, next_may_start, wait_for_last
from llmkit_kernels.triton_device import device_of

MOST_ROWS = 8
LARGEST = 256 * 2**20  # bytes of a weight; beyond, libraries are faster
_LARGEST_NORMED = 24 * 2**20  # beyond, a norm of its own is faster: every program computes it
_LARGEST_ASKED = 40 * 2**20  # what stays in the cache that all multiprocessors share until it is wanted
_LINE = tl.constexpr(64)  # elements of 16 bits in a line of that cache


@dataclass(frozen=True)
class _Block:
    """How one program works: rows of the weight, columns at a time, warps, loads under way as Triton counts them."""

    rows: int
    columns: int
    warps: int
    stages: int


# As measured on an H200; cut down to the shared memory that there is.
_NORMED = _Block(32, 256, 4, 6)
_NORMED_GATED = _Block(64, 256, 4, 4)
_FEW_PROGRAMS = _Block(16, 512, 4, 6)
_MANY_PROGRAMS = _Block(16, 512, 4, 4)  # several share a multiprocessor


@triton.jit
def _ask_for(weight_ptr, row, k, BLOCK_K: tl.constexpr):
    """Have rows brought to the cache that all multiprocessors share."""
    for first in range(0, k, BLOCK_K):
        line = tl.minimum(first + tl.arange(0, BLOCK_K // _LINE) * _LINE, k - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [weight_ptr + (row[:, None] + line[None, :])],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _silu_of_half(result, OWN: tl.constexpr, BLOCK_M: tl.constexpr, TYPE: tl.constexpr):
    """SiLU of the first OWN of 2 * OWN rows, times the others: float32 [OWN, BLOCK_M]."""
    halves = tl.reshape(result.to(TYPE).to(tl.float32), (2, OWN, BLOCK_M))
    gate, up = tl.split(tl.permute(halves, (1, 2, 0)))
    return (gate / (1.0 + tl.exp(-gate))).to(TYPE).to(tl.float32) * up  # rounded where the reference rounds


@triton.jit
def _store(result, out_ptr, bias_ptr, out_row, token, rows, n, BIASED: tl.constexpr):
    """result float32 [out_row, token] to out [rows, n], with the bias."""
    if BIASED:
        result += tl.load(bias_ptr + out_row, mask=out_row < n, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + (token * n)[None, :] + out_row[:, None]
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=(out_row < n)[:, None] & (token < rows)[None, :])


@triton.jit
def few_rows_kernel(
    x_ptr, residual_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, total_ptr, rows, n, k, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, COMPUTE: tl.constexpr,
    EARLY: tl.constexpr, ASKS: tl.constexpr,
):  # fmt: skip
    """x, residual, total [rows, k], weight [n, k] or, GATED, [2 * n, k], out [rows, n], all dense; rows <= BLOCK_M.

    NORMED: x + residual goes to total, and the product is with its norm. GATED: out is SiLU of the product with the
    weight's first half, times that with its second. EVEN: k is a multiple of BLOCK_K. EARLY: see `triton_chain`.
    """
    own: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    first = tl.program_id(0) * own
    lane = tl.arange(0, BLOCK_N)
    if GATED:
        weight_row = tl.minimum(first + lane % own, n - 1) + lane // own * n
    else:
        weight_row = tl.minimum(first + lane, n - 1)
    weight_row *= k
    if EARLY:
        if ASKS:
            _ask_for(weight_ptr, weight_row, k, BLOCK_K)
        next_may_start()
        wait_for_last()
    span: tl.constexpr = BLOCK_K // PARTS
    column = tl.arange(0, PARTS)[:, None] * span + tl.arange(0, span)[None, :]
    token = tl.arange(0, BLOCK_M)
    kind = x_ptr.dtype.element_ty
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
            residual = tl.load(residual_ptr + start + place, mask=there, other=0.0)
            total = (x.to(tl.float32) + residual.to(tl.float32)).to(kind)
            tl.store(total_ptr + start + place, total, mask=there & (first + token == token)[None, None, :])
            wide = total.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            if EVEN:
                scale = tl.load(norm_ptr + start + column)
            else:
                scale = tl.load(norm_ptr + start + column, mask=start + column < k, other=0.0)
            x = (wide * scale.to(tl.float32)[:, :, None]).to(kind)  # the rest of the norm is a factor of the row
        acc = tl.dot(weight.to(COMPUTE), x.to(COMPUTE), acc, input_precision="ieee")
    result = tl.sum(acc, 0)
    if NORMED:
        result *= (1.0 / tl.sqrt_rn(tl.sum(squares, 0) / k + eps))[None, :]
    out_row = first + tl.arange(0, own)
    if GATED:
        result = _silu_of_half(result, own, BLOCK_M, kind)
    _store(result, out_ptr, bias_ptr, out_row, token, rows, n, BIASED)


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel pays for x [t, k] and weight [n, k] and can do it."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and weight.dtype == x.dtype
        and x.dim() == 2
        and 0 < x.shape[0] <= MOST_ROWS
        and x.shape[1] % 16 == 0
        and weight.nbytes <= LARGEST
        and x.is_contiguous()
        and weight.is_contiguous()
    )


def takes_norm(x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel also pays for the norm before the product. In bfloat16 alone: rows are multiplied by the
    norm's weight before they are made small, which could be too much for float16."""
    return (
        takes(x, weight)
        and x.dtype == residual.dtype == norm.dtype == torch.bfloat16
        and weight.nbytes <= _LARGEST_NORMED
        and residual.is_contiguous()
    )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `KernelTable.linear`; for what `takes` says."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    _launch(_plain_block(out.shape[1], x.device), x, x, x, weight, bias, out, out, 0.0)
    return out


def silu_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`silu_and_mul` of x times weight [2d, k]: [t, d]; for what `takes` says."""
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    _launch(_plain_block(weight.shape[0], x.device), x, x, x, weight, None, out, out, 0.0, gated=True)
    return out


def normed_linear(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `KernelTable.add_rms_norm_linear`; for what `takes_norm` says."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    total = torch.empty_like(x)
    _launch(_NORMED, x, residual, norm, weight, bias, out, total, eps, normed=True)
    return out, total


def normed_silu(
    x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `KernelTable.add_rms_norm_silu`; for what `takes_norm` says."""
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    total = torch.empty_like(x)
    _launch(_NORMED_GATED, x, residual, norm, weight, None, out, total, eps, normed=True, gated=True)
    return out, total


def _plain_block(weight_rows: int, device: torch.device) -> _Block:
    few = triton.cdiv(weight_rows, _FEW_PROGRAMS.rows) <= 2 * device_of(device).processors
    return _FEW_PROGRAMS if few else _MANY_PROGRAMS


def _launch(
    block: _Block,
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    total: torch.Tensor,
    eps: float,
    *,
    normed: bool = False,
    gated: bool = False,
) -> None:
    (rows, k), n = x.shape, out.shape[1]
    early = follows_early(x.device)
    options: dict[str, Any] = {"launch_pdl": True} if early else {}
    block = _fitted(block, normed, device_of(x.device).shared_memory)
    launch(
        few_rows_kernel, (triton.cdiv(n, block.rows // 2 if gated else block.rows),),
        x, residual, norm, weight, x if bias is None else bias, out, total, rows, n, k, eps,
        BLOCK_M=MOST_ROWS, BLOCK_N=block.rows, BLOCK_K=block.columns, PARTS=block.warps, STAGES=block.stages,
        EVEN=k % block.columns == 0, NORMED=normed, GATED=gated, BIASED=bias is not None,
        COMPUTE=tl.float32 if INTERPRETED else tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16,
        EARLY=early, ASKS=early and weight.nbytes <= _LARGEST_ASKED and not normed,
        num_warps=block.warps, num_stages=block.stages, **options,
    )  # fmt: skip


@functools.cache
def _fitted(block: _Block, normed: bool, shared_memory: int) -> _Block:
    """With as many stages as there is shared memory for: weight and rows, with a norm residual and weight too."""
    rows = block.rows + (2 * MOST_ROWS + 1 if normed else MOST_ROWS)
    most = shared_memory // (rows * block.columns * 2) + 1
    return replace(block, stages=max(2, min(block.stages, most)))
