"""Front door of `none`: weights stay in the model's type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.hookspecs.quantization import QuantizationMethod

if TYPE_CHECKING:
    import torch

    from llmkit.hookspecs.kernels import KernelTable

info = PluginInfo(summary="weights as they are, in the model's type")


class NoQuantization(QuantizationMethod):
    """Packs nothing, so that layers multiply through the kernel table themselves."""

    def pack(self, weight: torch.Tensor, role: str) -> None:  # noqa: ARG002
        return None

    def linear(self, x: torch.Tensor, packed: Any, bias: torch.Tensor | None, kernels: KernelTable) -> torch.Tensor:  # noqa: ARG002
        raise TypeError("quantization 'none' packs nothing, so there is nothing to multiply with")

    def embedding(self, ids: torch.Tensor, packed: Any, dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG002
        raise TypeError("quantization 'none' packs nothing, so there is nothing to look up")

    def nbytes(self, n: int, k: int, role: str, dtype: torch.dtype) -> int:  # noqa: ARG002
        return n * k * dtype.itemsize


@hookimpl
def llmkit_quantization() -> QuantizationMethod:
    return NoQuantization()
