"""Rows of activations as float8 numbers, each with a scale of its own, alone and behind the norm before a product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmkit.jit.chain import INTERPRETED, follows_early, next_may_start, wait_for_last
from llmkit.jit.rehearsal import launch
from llmkit_quantization.fp8_weight import FLOAT8, LARGEST

_LARGEST = tl.constexpr(LARGEST)


@triton.jit
def fp8_rows_kernel(
    x_ptr, residual_ptr, norm_ptr, codes_ptr, scales_ptr, row_stride, size, eps,
    BLOCK_D: tl.constexpr, NORMED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: a row. x [t, size] with a row stride, codes [t, size], scales [t]. NORMED: residual [t, size]
    becomes the sum with x, and codes are those of its norm. EARLY: see `llmkit.jit.chain`."""
    if EARLY:
        next_may_start()
        wait_for_last()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    inside = column < size
    place = row * size + column
    kind = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        residual = tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
        total = (x + residual).to(kind)
        tl.store(residual_ptr + place, total, mask=inside)
        wide = total.to(tl.float32)
        factor = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / size + eps)
        norm = tl.load(norm_ptr + column, mask=inside, other=0.0)
        x = ((wide * factor).to(norm.dtype).to(tl.float32) * norm.to(tl.float32)).to(kind).to(tl.float32)
    scale = tl.max(tl.abs(x), 0) / _LARGEST + tl.sum(x - x, 0)  # NaN where a number is not finite: a maximum is not
    scale = tl.where(scale == 0.0, 1.0, scale)
    quotient = tl.minimum(x / scale, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
    quotient = tl.maximum(quotient, -_LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(codes_ptr + place, quotient.to(codes_ptr.dtype.element_ty), mask=inside)
    tl.store(scales_ptr + row, scale)


def rounded_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`llmkit_quantization.fp8_weight.rounded_rows` of x [t, k]."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return _launch(x, x, x, 0.0, normed=False)


def add_norm_rounded(
    x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rounded_rows` of the norm of x + residual, which goes to `residual`; both [t, k], dense and of one type."""
    return _launch(x, residual, norm, eps, normed=True)


def _launch(
    x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float, *, normed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, size = x.shape
    # The interpreter does not round to float8 as it should.
    codes = torch.empty((rows, size), dtype=torch.float32 if INTERPRETED else FLOAT8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(size)
        early = follows_early(x.device)
        launch(
            fp8_rows_kernel, (rows,), x, residual, norm, codes, scales, x.stride(0), size, eps,
            BLOCK_D=block, NORMED=normed, EARLY=early, num_warps=max(1, min(16, block // 512)),
            **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return codes.to(FLOAT8) if INTERPRETED else codes, scales
