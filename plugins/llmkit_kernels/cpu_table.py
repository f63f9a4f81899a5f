"""The kernel table of the CPU: compiled operations where there are some, the reference for the rest."""

from __future__ import annotations

from typing import Any

import torch

from llmkit.mapped_memory import MappedMemory
from llmkit_kernels import cpu_fused, cpu_linear, cpu_panels
from llmkit_kernels.torch_table import TorchKernels


class CPUKernels(TorchKernels):
    """float32 operands take compiled kernels; other types take torch's operations."""

    def __init__(self) -> None:
        self._memory = MappedMemory()

    def arrange(self, weight: torch.Tensor, role: str) -> cpu_panels.PanelWeight | None:  # noqa: ARG002
        return cpu_panels.pack(weight, self._memory)

    def arranged_linear(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        return cpu_panels.linear(x, weight, bias)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return cpu_linear.linear(x, weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if weight.dtype is not x.dtype:
            return super().rms_norm(x, weight, eps)
        # Heads cut out of a wider row are copied: the kernel on the copy is faster than torch's chain in place.
        return cpu_fused.rms_norm(x.contiguous(), weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if weight.dtype is not x.dtype:
            return super().add_rms_norm(x, residual, weight, eps)
        return cpu_fused.fused_add_rms_norm(x, residual, weight, eps)

    def rotary(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor, head_size: int
    ) -> None:
        if query.dtype is not torch.float32 or cos_sin.shape[1] != head_size:
            super().rotary(positions, query, key, cos_sin, head_size)
            return
        cpu_fused.rotary(positions, query, key, cos_sin, head_size)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return cpu_fused.silu_and_mul(gate_up)
