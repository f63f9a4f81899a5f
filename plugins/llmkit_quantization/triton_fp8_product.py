"""Products of a few rows with a float8 weight: how the kernel in `llmkit.jit.few_rows` is used for them. Numbers of the
weight become those of the rows' type on their way to the product."""

from __future__ import annotations

import torch
import triton

from llmkit.jit.device import device_of
from llmkit.jit.few_rows import Block, Norm, fits, launch_few_rows
from llmkit_quantization.fp8_weight import Fp8Weight

_LARGEST_NORMED = 12 * 2**20  # bytes of a weight; beyond, a norm of its own is faster: every program computes it

# As measured on an H200; cut down to the shared memory that there is.
_NORMED = Block(32, 1024, 8, 3)
_NORMED_GATED = Block(32, 512, 4, 4)
_FEW_PROGRAMS = Block(16, 512, 4, 6)
_MANY_PROGRAMS = Block(16, 512, 4, 4)  # several share a multiprocessor


def takes_norm(x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, packed: Fp8Weight) -> bool:
    """Whether the kernel also pays for the norm before the product. In bfloat16 alone: rows are multiplied by the
    norm's weight before they are made small, which could be too much for float16."""
    return (
        fits(x)
        and x.dtype == residual.dtype == norm.dtype == torch.bfloat16
        and packed.codes.nbytes <= _LARGEST_NORMED
        and residual.is_contiguous()
    )


def linear(x: torch.Tensor, packed: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """x [t, k] times the weight [n, k], and bias [n]: [t, n]; for what `few_rows.fits` says."""
    out = torch.empty((x.shape[0], packed.codes.shape[0]), dtype=x.dtype, device=x.device)
    block = _plain_block(out.shape[1], x.device)
    launch_few_rows(block, x, packed.codes, out, scales=packed.scales, bias=bias)
    return out


def silu_linear(x: torch.Tensor, packed: Fp8Weight) -> torch.Tensor:
    """`silu_and_mul` of x times the weight [2d, k]: [t, d]; for what `few_rows.fits` says."""
    out = torch.empty((x.shape[0], packed.codes.shape[0] // 2), dtype=x.dtype, device=x.device)
    block = _plain_block(packed.codes.shape[0], x.device)
    launch_few_rows(block, x, packed.codes, out, scales=packed.scales, gated=True)
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
    before = Norm(residual, norm, eps, total=torch.empty_like(x))
    launch_few_rows(_NORMED, x, packed.codes, out, scales=packed.scales, bias=bias, norm=before)
    return out, before.total


def normed_silu(
    x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float, packed: Fp8Weight
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`silu_linear` of the norm of x + residual, x + residual); for what `takes_norm` says."""
    out = torch.empty((x.shape[0], packed.codes.shape[0] // 2), dtype=x.dtype, device=x.device)
    before = Norm(residual, norm, eps, total=torch.empty_like(x))
    launch_few_rows(_NORMED_GATED, x, packed.codes, out, scales=packed.scales, norm=before, gated=True)
    return out, before.total


def _plain_block(weight_rows: int, device: torch.device) -> Block:
    few = triton.cdiv(weight_rows, _FEW_PROGRAMS.rows) <= 4 * device_of(device).processors
    return _FEW_PROGRAMS if few else _MANY_PROGRAMS
