"""Products of a few rows with a weight in full precision: whether the kernels for them pay, which one, and how. Small
weights are held in registers (`triton_held_rows`), others stream through shared memory (`llmkit.jit.few_rows`)."""

from __future__ import annotations

import torch
import triton

from llmkit.jit.device import device_of
from llmkit.jit.few_rows import Block, Norm, fits, launch_few_rows
from llmkit_kernels import triton_held_rows

LARGEST = 256 * 2**20  # bytes of a weight; beyond, libraries are faster
_LARGEST_NORMED = 24 * 2**20  # beyond, a norm of its own is faster: every program computes it

# As measured on an H200; cut down to the shared memory that there is.
_NORMED = Block(32, 256, 4, 6)
_NORMED_GATED = Block(64, 256, 4, 4)
_FEW_PROGRAMS = Block(16, 512, 4, 6)
_MANY_PROGRAMS = Block(16, 512, 4, 4)  # several share a multiprocessor


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel pays for x [t, k] and weight [n, k] and can do it."""
    return (
        fits(x)
        and weight.dtype == x.dtype
        and x.shape[1] % 16 == 0
        and weight.nbytes <= LARGEST
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
    _launch(_plain_block(out.shape[1], x.device), x, weight, out, bias=bias)
    return out


def silu_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`silu_and_mul` of x times weight [2d, k]: [t, d]; for what `takes` says."""
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    _launch(_plain_block(weight.shape[0], x.device), x, weight, out, gated=True)
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
    before = Norm(residual, norm, eps, total=torch.empty_like(x))
    _launch(_NORMED, x, weight, out, bias=bias, norm=before)
    return out, before.total


def normed_silu(
    x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `KernelTable.add_rms_norm_silu`; for what `takes_norm` says."""
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    before = Norm(residual, norm, eps, total=torch.empty_like(x))
    _launch(_NORMED_GATED, x, weight, out, norm=before, gated=True)
    return out, before.total


def _plain_block(weight_rows: int, device: torch.device) -> Block:
    few = triton.cdiv(weight_rows, _FEW_PROGRAMS.rows) <= 2 * device_of(device).processors
    return _FEW_PROGRAMS if few else _MANY_PROGRAMS


def _launch(
    block: Block,
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    gated: bool = False,
) -> None:
    """block: for the kernel of `few_rows`."""
    if triton_held_rows.takes(weight, fused=norm is not None or gated):
        triton_held_rows.launch_held_rows(x, weight, out, bias=bias, norm=norm, gated=gated)
    else:
        launch_few_rows(block, x, weight, out, bias=bias, norm=norm, gated=gated)
