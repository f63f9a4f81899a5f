"""Products of some rows, too many for `triton_few_rows` and too few to keep the matrix units busy: again reading the
weight is what takes time, and the start of every kernel.

A program has BLOCK_N rows of the weight and all rows of the batch. Where that makes too few programs to read at full
speed, the columns are dealt out too, and what comes out are parts which the norm behind the product adds up
(`triton_norm`), as it reads them anyway. SiLU of gate and up is done in the product's launch: a program has the same
rows of both, side by side.

More rows, in blocks of them, are multiplied in parts as long as there are multiprocessors for two: libraries launch a
sum of their own, and the norm cannot start early behind theirs.
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
from llmkit.jit.few_rows import silu_and_mul
from llmkit.jit.rehearsal import launch

MOST_ROWS = 64  # of a program, and of a product that is not in parts
MOST_ROWS_IN_PARTS = 256
LARGEST = 512 * 2**20  # bytes of a weight: a head of 152 000 tokens is as fast as libraries have it, and starts early


@dataclass(frozen=True)
class _Block:
    """How one program works: rows of the weight, columns at a time, warps, loads under way as Triton counts them;
    splits: programs that share the columns of the same rows."""

    rows: int
    columns: int
    warps: int
    stages: int
    splits: int = 1


# As measured on an H200; cut down to the shared memory that there is.
_BLOCKS = (_Block(128, 128, 8, 4), _Block(64, 128, 4, 4), _Block(32, 128, 4, 4))
_BLOCK_OF_SEVERAL = _BLOCKS[1]
_ENOUGH = 0.7  # programs for each multiprocessor, to read at full speed


@triton.jit
def some_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, n, k, span,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, COMPUTE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x [rows, k], weight [n, k] or, GATED, [2 * n, k], out [splits, rows, n], all dense. Grid: (blocks of rows, blocks
    of n, splits).

    Split s is the product of columns s * span to (s + 1) * span, a multiple of BLOCK_K. GATED: out is SiLU of the
    product with the first half of the weight, times that with the second. EVEN: k is a multiple of BLOCK_K. BIASED and
    GATED: with one split. EARLY: see `llmkit.jit.chain`.
    """
    own: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    first = tl.program_id(1) * own
    lane = tl.arange(0, BLOCK_N)
    if GATED:
        weight_row = tl.minimum(first + lane // 2, n - 1) + lane % 2 * n
    else:
        weight_row = tl.minimum(first + lane, n - 1)
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = (token < rows)[:, None]
    column = tl.arange(0, BLOCK_K)
    weight_cell = weight_ptr + ((weight_row * k)[:, None] + column[None, :])
    x_cell = x_ptr + ((token * k)[:, None] + column[None, :])
    begin = tl.program_id(2) * span
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if EARLY:
        next_may_start()
        wait_for_last()
    for start in tl.range(begin, tl.minimum(begin + span, k), BLOCK_K, num_stages=STAGES):
        if EVEN:
            weight = tl.load(weight_cell + start)
            x = tl.load(x_cell + start, mask=there, other=0.0)
        else:
            inside = (start + column < k)[None, :]
            weight = tl.load(weight_cell + start, mask=inside, other=0.0)
            x = tl.load(x_cell + start, mask=there & inside, other=0.0)
        acc = tl.dot(x.to(COMPUTE), tl.trans(weight.to(COMPUTE)), acc, input_precision="ieee")
    kind = out_ptr.dtype.element_ty
    if GATED:
        gate, up = tl.split(tl.reshape(acc.to(kind).to(tl.float32), (BLOCK_M, own, 2)))
        acc = silu_and_mul(gate, up, kind)
    out_row = first + tl.arange(0, own)
    if BIASED:
        acc += tl.load(bias_ptr + out_row, mask=out_row < n, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + (tl.program_id(2) * rows + token)[:, None] * n + out_row[None, :]
    tl.store(out, acc.to(kind), mask=there & (out_row < n)[None, :])


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel pays for x [t, k] and weight [n, k] and can do it."""
    return _takes(x, weight, MOST_ROWS)


def takes_in_parts(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether it does in parts, and there are any."""
    return _takes(x, weight, MOST_ROWS_IN_PARTS) and _split_block(x, weight).splits > 1


def _takes(x: torch.Tensor, weight: torch.Tensor, most_rows: int) -> bool:
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and weight.dtype == x.dtype
        and x.dim() == 2
        and 0 < x.shape[0] <= most_rows
        and x.shape[1] % 16 == 0
        and weight.nbytes <= LARGEST
        and x.is_contiguous()
        and weight.is_contiguous()
    )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `KernelTable.linear`; for what `takes` says."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    _launch(_whole_block(weight, x.device), x, weight, bias, out)
    return out


def silu_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`silu_and_mul` of x times weight [2d, k]: [t, d]; for what `takes` says."""
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    _launch(_whole_block(weight, x.device), x, weight, None, out, gated=True)
    return out


def linear_in_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See `KernelTable.linear_in_parts`; for what `takes_in_parts` says."""
    block = _split_block(x, weight)
    out = torch.empty((block.splits, x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    _launch(block, x, weight, None, out)
    return out


def _launch(
    block: _Block,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    gated: bool = False,
) -> None:
    (rows, k), n = x.shape, out.shape[-1]
    early = follows_early(x.device)
    options: dict[str, Any] = {"launch_pdl": True} if early else {}
    own = block.rows // 2 if gated else block.rows
    launch(
        some_rows_kernel, (triton.cdiv(rows, MOST_ROWS), triton.cdiv(n, own), block.splits),
        x, weight, x if bias is None else bias, out, rows, n, k, _span(k, block),
        BLOCK_M=MOST_ROWS, BLOCK_N=block.rows, BLOCK_K=block.columns, STAGES=block.stages,
        EVEN=k % block.columns == 0, GATED=gated, BIASED=bias is not None,
        COMPUTE=tl.float32 if INTERPRETED else tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16,
        EARLY=early, num_warps=block.warps, num_stages=block.stages, **options,
    )  # fmt: skip


def _span(k: int, block: _Block) -> int:
    """Columns of a split."""
    return triton.cdiv(k, block.splits * block.columns) * block.columns


def _whole_block(weight: torch.Tensor, device: torch.device) -> _Block:
    return _chosen(weight.shape[0], weight.shape[1], 1, device_of(device))


def _split_block(x: torch.Tensor, weight: torch.Tensor) -> _Block:
    return _chosen(weight.shape[0], weight.shape[1], 2, device_of(x.device), triton.cdiv(x.shape[0], MOST_ROWS))


@functools.cache
def _chosen(weight_rows: int, k: int, splits: int, device: Device, row_blocks: int = 1) -> _Block:
    """The most rows with which there are enough programs, with as many stages as there is shared memory for. Splits
    are so many, or, where the fewest rows are too many, as many as there are multiprocessors for. row_blocks: blocks of
    the batch's rows; several share what they read of the weight, so that more of its rows and splits pay."""
    enough = _ENOUGH * device.processors
    block = _BLOCK_OF_SEVERAL
    if row_blocks == 1:
        block = next((each for each in _BLOCKS if triton.cdiv(weight_rows, each.rows) * splits >= enough), _BLOCKS[-1])
    if splits > 1:
        splits = max(1, device.processors // (triton.cdiv(weight_rows, block.rows) * row_blocks))
        splits = min(splits, triton.cdiv(k, block.columns))
        splits = triton.cdiv(k, _span(k, replace(block, splits=splits)))  # none of them empty
    stages = device.shared_memory // ((MOST_ROWS + block.rows) * block.columns * 2)
    return replace(block, stages=max(2, min(block.stages, stages)), splits=splits)
