"""SiLU of one half of a row times the other half."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmkit.jit.chain import follows_early, next_may_start, wait_for_last
from llmkit.jit.rehearsal import launch

_BLOCK = 1024


@triton.jit
def silu_kernel(gate_up_ptr, out_ptr, row_stride, size, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """One program: BLOCK columns of one row. gate_up [t, 2 * size] with a row stride, out dense [t, size]."""
    if EARLY:
        next_may_start()
        wait_for_last()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    place = gate_up_ptr + row * row_stride + column
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + size, mask=inside, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)  # rounded where the reference rounds
    tl.store(out_ptr + row * size + column, (silu * up).to(kind), mask=inside)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [t, 2d], rows dense → [t, d]."""
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        early = follows_early(gate_up.device)
        launch(
            silu_kernel, (tokens, triton.cdiv(size, _BLOCK)), gate_up, out, gate_up.stride(0), size,
            BLOCK=_BLOCK, EARLY=early, **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return out
