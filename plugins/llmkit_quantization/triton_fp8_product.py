"""Products of a few rows with a float8 weight, which take as long as reading it: numbers of the weight become those of
the rows' type on their way to the product, and what stands before and behind it is done in the same launch.

A program has BLOCK_N rows of the weight and all rows of the batch. Its warps share the columns out among themselves,
each with a chain of products of its own, and their results are added up at the end. On GPUs that can start a kernel
before the one ahead of it has ended, small weights are asked for before the kernel waits: no kernel writes weights.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmkit.jit.float8 import widened
from llmkit.jit.rehearsal import launch
from llmkit_quantization.fp8_weight import Fp8Weight

INTERPRETED: bool = triton.knobs.runtime.interpret

MOST_ROWS = 8
_LARGEST_NORMED = 12 * 2**20  # bytes of a weight; beyond, a norm of its own is faster: every program computes it
_LARGEST_ASKED = 40 * 2**20  # what stays in the cache that all multiprocessors share until it is wanted
_LINE = tl.constexpr(128)  # bytes of a line of that cache


@dataclass(frozen=True)
class _Block:
    """How one program works: rows of the weight, columns at a time, warps, loads under way as Triton counts them."""

    rows: int
    columns: int
    warps: int
    stages: int


# As measured on an H200; cut down to the shared memory that there is.
_NORMED = _Block(32, 1024, 8, 3)
_NORMED_GATED = _Block(32, 512, 4, 4)
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
def fp8_few_rows_kernel(
    x_ptr, residual_ptr, norm_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, total_ptr, rows, n, k, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, COMPUTE: tl.constexpr,
    EARLY: tl.constexpr, ASKS: tl.constexpr,
):  # fmt: skip
    """x, residual, total [rows, k], weight float8 [n, k] with scale float32 [n] or, GATED, [2 * n, k] and [2 * n], out
    [rows, n], all dense; rows <= BLOCK_M.

    NORMED: x + residual goes to total, and the product is with its norm. GATED: out is SiLU of the product with the
    first half of the weight, times that with the second. EVEN: k is a multiple of BLOCK_K. PARTS: warps. EARLY: the
    launch may start before the kernel ahead has ended, and lets the next one do so; ASKS: then the weight is asked for
    first.
    """
    own: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    first = tl.program_id(0) * own
    lane = tl.arange(0, BLOCK_N)
    weight_row = first + lane
    if GATED:
        weight_row = tl.minimum(first + lane % own, n - 1) + lane // own * n
    else:
        weight_row = tl.minimum(weight_row, n - 1)
    row_scale = tl.load(scale_ptr + weight_row)
    weight_row = weight_row.to(tl.int64) * k
    if EARLY:
        if ASKS:
            _ask_for(weight_ptr, weight_row, k, BLOCK_K)
        gdc_launch_dependents()
        gdc_wait()
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
        acc = tl.dot(widened(weight, COMPUTE), x.to(COMPUTE), acc, input_precision="ieee")
    result = tl.sum(acc, 0) * row_scale[:, None]
    if NORMED:
        result *= (1.0 / tl.sqrt_rn(tl.sum(squares, 0) / k + eps))[None, :]
    out_row = first + tl.arange(0, own)
    if GATED:
        halves = tl.reshape(result.to(kind).to(tl.float32), (2, own, BLOCK_M))
        gate, up = tl.split(tl.permute(halves, (1, 2, 0)))
        silu = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)  # rounded where the reference rounds
        result = silu * up
    if BIASED:
        result += tl.load(bias_ptr + out_row, mask=out_row < n, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + (token * n)[None, :] + out_row[:, None]
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=(out_row < n)[:, None] & (token < rows)[None, :])


def takes(x: torch.Tensor) -> bool:
    """Whether the kernel pays for x [t, k] and can do it."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and x.dim() == 2
        and 0 < x.shape[0] <= MOST_ROWS
        and x.is_contiguous()
    )


def takes_norm(x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, packed: Fp8Weight) -> bool:
    """Whether the kernel also pays for the norm before the product. In bfloat16 alone: rows are multiplied by the
    norm's weight before they are made small, which could be too much for float16."""
    return (
        takes(x)
        and x.dtype == residual.dtype == norm.dtype == torch.bfloat16
        and packed.codes.nbytes <= _LARGEST_NORMED
        and residual.is_contiguous()
    )


def linear(x: torch.Tensor, packed: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """x [t, k] times the weight [n, k], and bias [n]: [t, n]; for what `takes` says."""
    out = torch.empty((x.shape[0], packed.codes.shape[0]), dtype=x.dtype, device=x.device)
    _launch(_plain_block(out.shape[1], x.device), x, x, x, packed, bias, out, out, 0.0)
    return out


def silu_linear(x: torch.Tensor, packed: Fp8Weight) -> torch.Tensor:
    """`silu_and_mul` of x times the weight [2d, k]: [t, d]; for what `takes` says."""
    out = torch.empty((x.shape[0], packed.codes.shape[0] // 2), dtype=x.dtype, device=x.device)
    _launch(_plain_block(packed.codes.shape[0], x.device), x, x, x, packed, None, out, out, 0.0, gated=True)
    return out


def normed_linear(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    packed: Fp8Weight,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`linear` of the norm of x + residual, x + residual); for what `takes_norm` says."""
    out = torch.empty((x.shape[0], packed.codes.shape[0]), dtype=x.dtype, device=x.device)
    total = torch.empty_like(x)
    _launch(_NORMED, x, residual, norm, packed, bias, out, total, eps, normed=True)
    return out, total


def normed_silu(
    x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float, packed: Fp8Weight
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`silu_linear` of the norm of x + residual, x + residual); for what `takes_norm` says."""
    out = torch.empty((x.shape[0], packed.codes.shape[0] // 2), dtype=x.dtype, device=x.device)
    total = torch.empty_like(x)
    _launch(_NORMED_GATED, x, residual, norm, packed, None, out, total, eps, normed=True, gated=True)
    return out, total


@functools.cache
def starts_early(device: torch.device) -> bool:
    """Whether kernels on `device` can start before the one ahead has ended: Hopper and later of NVIDIA."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def _plain_block(weight_rows: int, device: torch.device) -> _Block:
    processors, _ = device_facts(device)
    few = triton.cdiv(weight_rows, _FEW_PROGRAMS.rows) <= 4 * processors
    return _FEW_PROGRAMS if few else _MANY_PROGRAMS


def _launch(
    block: _Block,
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: torch.Tensor,
    packed: Fp8Weight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    total: torch.Tensor,
    eps: float,
    *,
    normed: bool = False,
    gated: bool = False,
) -> None:
    (rows, k), n = x.shape, out.shape[1]
    early = starts_early(x.device)
    options: dict[str, Any] = {"launch_pdl": True} if early else {}
    block = _fitted(block, normed, device_facts(x.device)[1])
    launch(
        fp8_few_rows_kernel, (triton.cdiv(n, block.rows // 2 if gated else block.rows),),
        x, residual, norm, packed.codes, packed.scales, x if bias is None else bias, out, total, rows, n, k, eps,
        BLOCK_M=MOST_ROWS, BLOCK_N=block.rows, BLOCK_K=block.columns, PARTS=block.warps, STAGES=block.stages,
        EVEN=k % block.columns == 0, NORMED=normed, GATED=gated, BIASED=bias is not None,
        COMPUTE=tl.float32 if INTERPRETED else tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16,
        EARLY=early, ASKS=early and packed.codes.nbytes <= _LARGEST_ASKED and not normed,
        num_warps=block.warps, num_stages=block.stages, **options,
    )  # fmt: skip


@functools.cache
def _fitted(block: _Block, normed: bool, shared_memory: int) -> _Block:
    """With as many stages as there is shared memory for: weight and rows, with a norm residual and weight too."""
    rows = block.rows + 2 * (2 * MOST_ROWS + 1 if normed else MOST_ROWS)
    most = shared_memory // (rows * block.columns) + 1
    return replace(block, stages=max(2, min(block.stages, most)))


@functools.cache
def device_facts(device: torch.device) -> tuple[int, int]:
    """(multiprocessors, bytes of shared memory that a program can have)."""
    if device.type != "cuda":
        return 2, 2**17
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin
