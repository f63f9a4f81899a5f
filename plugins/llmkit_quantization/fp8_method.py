"""The method behind `fp8`: which kernel multiplies which rows.

More than a few rows are rounded to float8 themselves, each with a scale of its own, and multiplied by the matrix units
for such numbers. A few rows take as long as reading the weight: they stay as they are, and the weight's numbers are
widened on their way to the product, which is more exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from llmkit.errors import ModelError
from llmkit.hookspecs.attention import Support
from llmkit.hookspecs.quantization import QuantizationMethod
from llmkit.jit import few_rows
from llmkit_quantization import fp8_weight, triton_fp8_product, triton_fp8_rows, triton_fp8_some_rows
from llmkit_quantization.fp8_weight import Fp8Weight

if TYPE_CHECKING:
    from llmkit.hookspecs.kernels import KernelTable


class Fp8(QuantizationMethod):
    """head: whether the embedding and the head are packed as well."""

    def __init__(self, *, head: bool = False) -> None:
        self._head = head

    def support(self, stored: Mapping[str, frozenset[str]]) -> Support:  # noqa: ARG002
        return Support(reasons=("it would change the weights: it is used only when named",))

    def pack(self, weight: torch.Tensor, role: str) -> Fp8Weight | None:
        """Raises ModelError for values that are not finite."""
        if not self._packs(*weight.shape, role):
            return None
        packed = fp8_weight.pack(weight)
        if not bool(packed.scales.isfinite().all()):
            raise ModelError(
                f"A weight of {list(weight.shape)} ({role}) has values that are not finite, which fp8 cannot hold.",
                hint="Use --quantization none.",
            )
        return packed

    def linear(
        self,
        x: torch.Tensor,
        packed: Fp8Weight,
        bias: torch.Tensor | None,
        kernels: KernelTable,  # noqa: ARG002
    ) -> torch.Tensor:
        if few_rows.fits(x):
            return triton_fp8_product.linear(x, packed, bias)
        return _product(*triton_fp8_rows.rounded_rows(x), packed, bias, x.dtype)

    def add_rms_norm_linear(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        packed: Fp8Weight,
        bias: torch.Tensor | None,
        kernels: KernelTable,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if triton_fp8_product.takes_norm(x, residual, norm, packed):
            return triton_fp8_product.normed_linear(x, residual, norm, eps, packed, bias)
        if few_rows.fits(x) or not _dense(x, residual):
            normed, total = kernels.add_rms_norm(x, residual, norm, eps)
            return self.linear(normed, packed, bias, kernels), total
        codes, scales = triton_fp8_rows.add_norm_rounded(x, residual, norm, eps)
        return _product(codes, scales, packed, bias, x.dtype), residual

    def add_rms_norm_silu(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        packed: Fp8Weight,
        kernels: KernelTable,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if triton_fp8_product.takes_norm(x, residual, norm, packed):
            return triton_fp8_product.normed_silu(x, residual, norm, eps, packed)
        if few_rows.fits(x):
            normed, total = kernels.add_rms_norm(x, residual, norm, eps)
            return triton_fp8_product.silu_linear(normed, packed), total
        if _dense(x, residual) and triton_fp8_some_rows.takes(x.shape[0]):
            codes, scales = triton_fp8_rows.add_norm_rounded(x, residual, norm, eps)
            return triton_fp8_some_rows.silu_linear(codes, scales, packed, x.dtype), residual
        product, total = self.add_rms_norm_linear(x, residual, norm, eps, packed, None, kernels)
        return kernels.silu_and_mul(product), total

    def embedding(self, ids: torch.Tensor, packed: Fp8Weight, dtype: torch.dtype) -> torch.Tensor:
        return fp8_weight.widened(packed, ids).to(dtype)

    def nbytes(self, n: int, k: int, role: str, dtype: torch.dtype) -> int:
        return fp8_weight.packed_bytes(n, k) if self._packs(n, k, role) else n * k * dtype.itemsize

    def _packs(self, n: int, k: int, role: str) -> bool:
        return (self._head or role == "linear") and fp8_weight.takes(n, k)


def _dense(x: torch.Tensor, residual: torch.Tensor) -> bool:
    return x.shape == residual.shape and x.dtype == residual.dtype and x.is_contiguous() and residual.is_contiguous()


def _product(
    codes: torch.Tensor, scales: torch.Tensor, packed: Fp8Weight, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """codes float8 [t, k] with scales [t] of their rows, times the weight [n, k], and bias [n]: [t, n] in `dtype`, of
    many rows rounded to bfloat16, which is all that libraries write here.

    Fast accumulation: what it adds to the error (products of 14336 columns 0.3 % instead of 0.2 %) is small beside that
    of rounding rows and weight (3.8 %), and without it prompts take a quarter more time."""
    if triton_fp8_some_rows.takes(codes.shape[0]):
        return triton_fp8_some_rows.linear(codes, scales, packed, bias, dtype)
    product: torch.Tensor = torch._scaled_mm(
        codes,
        packed.codes.t(),
        scales[:, None],
        packed.scales[None, :],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    if dtype is not torch.bfloat16:
        product = product.to(dtype)
    return product if bias is None else product.add_(bias)
