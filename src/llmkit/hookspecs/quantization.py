"""Kind `quantization`: how the weights of linear layers are stored and multiplied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmkit.hookspecs.attention import Support
from llmkit.hookspecs.markers import hookspec

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

    from llmkit.hookspecs.kernels import KernelTable


class QuantizationMethod(ABC):
    """Packs a linear layer's full-precision weight once, at load time, and multiplies with it every step.

    The packed form is opaque to the layer that carries it. A layer whose sizes the method cannot take is left in
    full precision by returning None from `pack`.
    """

    def support(self, stored: Mapping[str, frozenset[str]]) -> Support:
        """Asked for "auto" only: how well the method suits a model whose matrices are `stored` so
        (`WeightsFormat.stored_types`). A method that would change the model's numbers gives its reasons, and is then
        used only when named."""
        return Support()

    @abstractmethod
    def pack(self, weight: torch.Tensor, role: str) -> Any | None:
        """weight [n, k] in the model's dtype → packed form, or None for "keep it as it is".

        `role` is "linear", "lm_head" or "embedding" (a tied head is packed once, as "embedding").
        """

    @abstractmethod
    def linear(self, x: torch.Tensor, packed: Any, bias: torch.Tensor | None, kernels: KernelTable) -> torch.Tensor:
        """x [t, k] → [t, n]."""

    def add_rms_norm_linear(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        packed: Any,
        bias: torch.Tensor | None,
        kernels: KernelTable,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`KernelTable.add_rms_norm_linear` with a packed weight; x, which may be a result of `linear_in_parts`, and
        residual may be overwritten. None: nothing was done, so that the layer does one after the other."""
        return None

    def add_rms_norm_silu(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        packed: Any,
        kernels: KernelTable,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`KernelTable.add_rms_norm_silu` likewise."""
        return None

    @abstractmethod
    def embedding(self, ids: torch.Tensor, packed: Any, dtype: torch.dtype) -> torch.Tensor:
        """Rows `ids` int64 [t] of a packed embedding → [t, k] in `dtype`."""

    @abstractmethod
    def nbytes(self, n: int, k: int, role: str, dtype: torch.dtype) -> int:
        """Bytes that a weight [n, k] will take when packed; used by the memory plan before anything is loaded."""


@hookspec(firstresult=True)
def llmkit_quantization(options: BaseModel | None) -> QuantizationMethod:  # type: ignore[empty-body]
    """Build the method. `options` is an instance of `info.options`, validated; None if there is none.

    .. versionadded:: 0.1
    """
