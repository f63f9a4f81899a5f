"""Root-mean-square layer normalisation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from llmkit.layers.module import Module, WeightSlot

if TYPE_CHECKING:
    from llmkit.layers.context import ModelContext


class RMSNorm(Module):
    """x / sqrt(mean(x²) + eps) * weight. Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).

    offset: added to the checkpoint's weight. The sum is kept in float32 whatever the model's type, as those who store
    weights as differences from 1 compute it.
    """

    def __init__(self, context: ModelContext, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.offset = offset
        self.weight: torch.Tensor | None = None
        self._dtype = torch.float32 if offset else context.dtype
        self._device = context.device
        self._kernels = context.kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] → the same shape."""
        return self._kernels.rms_norm(x, self.weight, self.eps)  # type: ignore[arg-type]

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual); `x` and `residual` [t, size] may be overwritten."""
        return self._kernels.add_rms_norm(x, residual, self.weight, self.eps)  # type: ignore[arg-type]

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        self.weight = None
        yield f"{path}.weight", WeightSlot((self.size,), self._load)

    def parameter_bytes(self) -> int:
        return self.size * self._dtype.itemsize

    def _load(self, tensor: torch.Tensor) -> None:
        # A copy: the reader's tensor may be a view of a mapped file.
        self.weight = torch.empty(self.size, dtype=self._dtype, device=self._device).copy_(tensor)
        if self.offset:
            self.weight += self.offset
