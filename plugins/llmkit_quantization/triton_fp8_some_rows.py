"""Products of some float8 rows with a float8 weight: too many rows to widen the weight for, too few to keep the matrix
units busy, so that again reading the weight is what takes time.

A program has BLOCK_N rows of the weight and all rows of the batch. Where that makes too few programs to read at full
speed, the columns are dealt out too: each program leaves its part, and the one that comes last adds them up, always in
the same order. Who is last is counted in `Fp8Weight.turns`, which is zero between products.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from llmkit.jit.chain import INTERPRETED, follows_early, next_may_start, wait_for_last
from llmkit.jit.device import Device, device_of
from llmkit.jit.few_rows import silu_of_pairs, store_columns
from llmkit.jit.rehearsal import launch
from llmkit_quantization.fp8_weight import Fp8Weight

MOST_ROWS = 64
_LEAST_STEPS = 8  # blocks of columns of a split


@dataclass(frozen=True)
class _Block:
    """How one program works: rows of the weight, columns at a time, warps, loads under way as Triton counts them;
    splits: programs that share the columns of the same rows."""

    rows: int
    columns: int
    warps: int
    stages: int
    splits: int = 1


_BLOCK = _Block(64, 256, 4, 4)  # as measured on an H200; `_chosen` adapts it


@triton.jit
def fp8_some_rows_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, parts_ptr, turns_ptr, rows, n, k, span,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
    EVEN: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, COMPUTE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x float8 [rows, k] with scale float32 [rows], weight float8 [n, k] with scale float32 [n] or, GATED, [2 * n, k]
    and [2 * n], out [rows, n], all dense, rows <= BLOCK_M; grid (blocks of n, SPLITS).

    Split s has the columns s * span to (s + 1) * span, a multiple of BLOCK_K. parts float32 [blocks, SPLITS, BLOCK_N,
    BLOCK_M], turns int32 [blocks]. GATED: out is SiLU of the product with the first half of the weight, times that with
    the second. EVEN: k is a multiple of BLOCK_K. EARLY: see `llmkit.jit.chain`.
    """
    own: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    block = tl.program_id(0)
    first = block * own
    lane = tl.arange(0, BLOCK_N)
    if GATED:
        weight_row = tl.minimum(first + lane // 2, n - 1) + lane % 2 * n
    else:
        weight_row = tl.minimum(first + lane, n - 1)
    weight_scale = tl.load(scale_ptr + weight_row)
    token = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_K)
    weight_cell = weight_ptr + (weight_row.to(tl.int64) * k)[:, None] + column[None, :]
    x_cell = x_ptr + (token * k)[:, None] + column[None, :]
    begin = tl.program_id(1) * span
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if EARLY:
        next_may_start()
        wait_for_last()
    there = token < rows
    for start in tl.range(begin, tl.minimum(begin + span, k), BLOCK_K, num_stages=STAGES):
        if EVEN:
            weight = tl.load(weight_cell + start)
            x = tl.load(x_cell + start, mask=there[:, None], other=0.0)
        else:
            inside = (start + column < k)[None, :]
            weight = tl.load(weight_cell + start, mask=inside, other=0.0)
            x = tl.load(x_cell + start, mask=there[:, None] & inside, other=0.0)
        acc = tl.dot(weight.to(COMPUTE), tl.trans(x.to(COMPUTE)), acc, input_precision="ieee")
    if SPLITS > 1:
        tile = lane[:, None] * BLOCK_M + token[None, :]
        part = parts_ptr + block.to(tl.int64) * (SPLITS * BLOCK_N * BLOCK_M) + tile
        tl.store(part + tl.program_id(1) * (BLOCK_N * BLOCK_M), acc)
        tl.debug_barrier()  # all of the part is written before the turn is taken
        turn = tl.atomic_add(turns_ptr + block, 1, sem="acq_rel")
        if turn < SPLITS - 1:
            return
        tl.debug_barrier()
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for split in range(SPLITS):
            acc += tl.load(part + split * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
        tl.store(turns_ptr + block, 0)
    acc *= weight_scale[:, None] * tl.load(x_scale_ptr + token, mask=there, other=0.0)[None, :]
    if GATED:
        acc = silu_of_pairs(acc, own, BLOCK_M, out_ptr.dtype.element_ty)
    store_columns(acc, out_ptr, bias_ptr, first + tl.arange(0, own), token, rows, n, BIASED)


def takes(rows: int) -> bool:
    """Whether the kernel pays for so many rows."""
    return 0 < rows <= MOST_ROWS


def linear(
    codes: torch.Tensor, scales: torch.Tensor, packed: Fp8Weight, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """codes float8 [t, k] with scales [t] of their rows, times the weight [n, k], and bias [n]: [t, n] in `dtype`."""
    out = torch.empty((codes.shape[0], packed.codes.shape[0]), dtype=dtype, device=codes.device)
    _launch(_block(packed, codes.shape[0]), codes, scales, packed, bias, out)
    return out


def silu_linear(codes: torch.Tensor, scales: torch.Tensor, packed: Fp8Weight, dtype: torch.dtype) -> torch.Tensor:
    """`silu_and_mul` of the product with a weight [2d, k]: [t, d]."""
    out = torch.empty((codes.shape[0], packed.codes.shape[0] // 2), dtype=dtype, device=codes.device)
    _launch(_block(packed, codes.shape[0]), codes, scales, packed, None, out, gated=True)
    return out


def _launch(
    block: _Block,
    codes: torch.Tensor,
    scales: torch.Tensor,
    packed: Fp8Weight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    gated: bool = False,
) -> None:
    (rows, k), n = codes.shape, out.shape[1]
    early = follows_early(codes.device)
    options: dict[str, Any] = {"launch_pdl": True} if early else {}
    blocks, block_m = triton.cdiv(n, block.rows // 2 if gated else block.rows), _block_m(rows)
    parts = scales
    if block.splits > 1:
        size = blocks * block.splits * block.rows * block_m
        parts = torch.empty(size, dtype=torch.float32, device=codes.device)
    launch(
        fp8_some_rows_kernel, (blocks, block.splits),
        codes, scales, packed.codes, packed.scales, out if bias is None else bias, out, parts, packed.turns,
        rows, n, k, _span(k, block),
        BLOCK_M=block_m, BLOCK_N=block.rows, BLOCK_K=block.columns, STAGES=block.stages, SPLITS=block.splits,
        EVEN=k % block.columns == 0, GATED=gated, BIASED=bias is not None,
        COMPUTE=tl.float32 if INTERPRETED else tl.float8e4nv, EARLY=early,
        num_warps=block.warps, num_stages=block.stages, **options,
    )  # fmt: skip


def _block_m(rows: int) -> int:
    return max(16, triton.next_power_of_2(rows))


def _span(k: int, block: _Block) -> int:
    """Columns of a split."""
    return triton.cdiv(k, block.splits * block.columns) * block.columns


def _block(packed: Fp8Weight, rows: int) -> _Block:
    return _chosen(*packed.codes.shape, _block_m(rows), device_of(packed.codes.device))


@functools.cache
def _chosen(weight_rows: int, k: int, block_m: int, device: Device) -> _Block:
    """As many splits as there are multiprocessors for, of eight blocks of columns and more. With more programs than
    multiprocessors, stages are so many that two programs fit one."""
    blocks = triton.cdiv(weight_rows, _BLOCK.rows)
    splits = max(1, min(device.processors // blocks, k // (_LEAST_STEPS * _BLOCK.columns)))
    splits = triton.cdiv(k, _span(k, replace(_BLOCK, splits=splits)))  # none of them empty
    room = device.shared_memory // 2 if blocks > device.processors else device.shared_memory
    stages = room // ((block_m + _BLOCK.rows) * _BLOCK.columns)
    return replace(_BLOCK, stages=max(2, min(_BLOCK.stages, stages)), splits=splits)
