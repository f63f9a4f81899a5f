"""Every operation of the kernel table in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from llmkit.hookspecs.kernels import KernelTable


class TorchKernels(KernelTable):
    """The reference: correct on any device and for any floating-point type. See `KernelTable` for the contracts."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, weight, bias)

    def embedding(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, weight)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return (normed.to(weight.dtype) * weight).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rotary(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor, head_size: int
    ) -> None:
        half = cos_sin.shape[-1] // 2
        table = cos_sin.index_select(0, positions)
        cos, sin = table[:, None, :half], table[:, None, half:]
        for rows in (query, key):
            heads = rows.view(rows.shape[0], -1, head_size)
            first, second = heads[..., :half], heads[..., half : 2 * half]
            turned = first * cos - second * sin
            second.copy_(second * cos + first * sin)
            first.copy_(turned)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_tanh_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up
