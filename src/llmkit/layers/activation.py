"""Gated activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from llmkit.errors import ModelError

if TYPE_CHECKING:
    import torch

    from llmkit.hookspecs.kernels import KernelTable


def gated_activation(kernels: KernelTable, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The table's operation [t, 2d] → [t, d] for `DecoderConfig.activation`. Raises ModelError if it has none."""
    operation: Callable[[torch.Tensor], torch.Tensor] | None = getattr(kernels, f"{name}_and_mul", None)
    if operation is None:
        raise ModelError(f"The activation {name!r} has no operation {name}_and_mul in the kernel table.")
    return operation
