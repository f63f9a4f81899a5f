"""Root-mean-square norm, alone and behind the addition to the residual stream."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmkit.jit.chain import follows_early, next_may_start, wait_for_last
from llmkit.jit.rehearsal import launch

_ELEMENTS = 4096  # of a program, for rows as short as a head


@triton.jit
def _normed(x, weight, eps, size, TYPE: tl.constexpr):
    """Rows x float32 [g, d] and weight [d] → float32 [g, d], rounded where the reference rounds."""
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / size + eps)
    return (x * scale[:, None]).to(TYPE).to(tl.float32) * weight.to(tl.float32)[None, :]


@triton.jit
def norm_kernel(
    x_ptr, weight_ptr, out_ptr, row_stride, group_stride, groups, size, eps,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_G of the groups of one token. x [t, groups, size] with strides, out dense."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    column = tl.arange(0, BLOCK_D)
    inside = (group < groups)[:, None] & (column < size)[None, :]
    place = token * row_stride + group[:, None] * group_stride + column[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < size, other=0.0)
    result = _normed(x, weight, eps, size, weight_ptr.dtype.element_ty)
    out = out_ptr + (token * groups + group[:, None]) * size + column[None, :]
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def embedding_norm_kernel(
    ids_ptr, table_ptr, weight_ptr, out_ptr, vectors_ptr, size, table_stride, eps,
    BLOCK_D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: a token. Writes its row of the table to vectors and that row's norm to out, both dense [t, size]."""
    column = tl.arange(0, BLOCK_D)
    inside = column < size
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    if EARLY:
        next_may_start()
        wait_for_last()
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(ids_ptr + token).to(tl.int64)
    x = tl.load(table_ptr + row * table_stride + column, mask=inside, other=0.0)
    tl.store(vectors_ptr + token * size + column, x, mask=inside)
    result = _normed(x.to(tl.float32)[None, :], weight, eps, size, weight_ptr.dtype.element_ty)
    result = tl.sum(result, 0)  # of one row: drops the first dimension
    tl.store(out_ptr + token * size + column, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, size, part_stride, eps,
    PARTS: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: a row. Writes the sum to residual and its norm to out; x [PARTS, t, size], residual and out
    [t, size], all dense."""
    column = tl.arange(0, BLOCK_D)
    inside = column < size
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    if EARLY:
        next_may_start()
        wait_for_last()
    place = tl.program_id(0).to(tl.int64) * size + column
    kind = residual_ptr.dtype.element_ty
    residual = tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_ptr + part * part_stride + place, mask=inside, other=0.0)
    total = (x.to(kind).to(tl.float32) + residual).to(kind)  # rounded where the reference rounds
    tl.store(residual_ptr + place, total, mask=inside)
    result = _normed(total.to(tl.float32)[None, :], weight, eps, size, weight_ptr.dtype.element_ty)
    result = tl.sum(result, 0)  # of one row: drops the first dimension
    tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [t, d] or [t, groups, d], the last dimension dense → the same shape, dense."""
    rows = x if x.dim() == 3 else x.unsqueeze(1)
    tokens, groups, size = rows.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    block_d = triton.next_power_of_2(size)
    block_g = min(triton.next_power_of_2(groups), max(1, _ELEMENTS // block_d))
    launch(
        norm_kernel, (tokens, triton.cdiv(groups, block_g)),
        rows, weight, out, rows.stride(0), rows.stride(1), groups, size, eps,
        BLOCK_G=block_g, BLOCK_D=block_d, num_warps=_warps(block_g * block_d),
    )  # fmt: skip
    return out


def embedding_norm(
    ids: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int64 [t], table [vocabulary, d], rows dense → (norm of the ids' rows, these), dense [t, d]."""
    tokens, size = len(ids), table.shape[1]
    out, vectors = (torch.empty((tokens, size), dtype=table.dtype, device=ids.device) for _ in range(2))
    if tokens:
        block_d = triton.next_power_of_2(size)
        early = follows_early(ids.device)
        launch(
            embedding_norm_kernel, (tokens,), ids, table, weight, out, vectors, size, table.stride(0), eps,
            BLOCK_D=block_d, EARLY=early, num_warps=_warps(block_d), **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return out, vectors


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual dense [t, d], both overwritten, or x dense float32 [parts, t, d] to be summed → (norm of the sum, the
    sum)."""
    tokens, size = residual.shape
    parts, out = (1, x) if x.dim() == 2 else (x.shape[0], torch.empty_like(residual))
    if tokens:
        block_d = triton.next_power_of_2(size)
        early = follows_early(x.device)
        launch(
            add_norm_kernel, (tokens,), x, residual, weight, out, size, tokens * size, eps,
            PARTS=parts, BLOCK_D=block_d, EARLY=early, num_warps=_warps(block_d),
            **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return out, residual


def _warps(elements: int) -> int:
    return max(1, min(16, elements // 256))
