"""The gated feed-forward block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmkit.layers.activation import gated_activation
from llmkit.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from llmkit.layers.module import Module

if TYPE_CHECKING:
    import torch

    from llmkit.layers.context import ModelContext
    from llmkit.layers.norm import RMSNorm


class GatedMLP(Module):
    """down(act(gate(x)) * up(x)). Source: Shazeer, "GLU Variants Improve Transformer" (2020)."""

    def __init__(self, context: ModelContext, *, bias: bool = False, fused: bool = False) -> None:
        """fused: the checkpoint has gate and up as one tensor, `gate_up_proj`."""
        super().__init__()
        hidden, inner = context.config.hidden_size, context.config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            context, hidden, {"gate_proj": inner, "up_proj": inner}, bias=bias, fused=fused
        )
        self.down_proj = RowParallelLinear(context, inner, hidden, bias=bias)
        self._activation = gated_activation(context.kernels, context.config.activation)
        self._is_silu = context.config.activation == "silu"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [t, hidden_size] → [t, hidden_size]."""
        return self.down_proj.forward(self._activation(self.gate_up_proj.forward(x)))

    def after_norm(self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(`forward` of norm(x + residual), x + residual), the first as of `RowParallelLinear.before_norm`; residual
        [t, hidden_size] and x, which may be such a result, too, may be overwritten."""
        if self._is_silu and not self.gate_up_proj.has_bias:
            done = self.gate_up_proj.weight.silu_after_norm(norm, x, residual)
            if done is not None:
                return self.down_proj.before_norm(done[0]), done[1]
        normed, total = norm.add(x, residual)
        return self.down_proj.before_norm(self._activation(self.gate_up_proj.forward(normed))), total
