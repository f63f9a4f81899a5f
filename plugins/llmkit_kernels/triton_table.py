"""The kernel table of CUDA GPUs: fused operations where there are some, the reference for the rest."""

from __future__ import annotations

import torch

from llmkit.hookspecs.kernels import HeadNorms
from llmkit.sampling.device_draw import DeviceDraws, DrawParameters
from llmkit_kernels import (
    triton_activation,
    triton_draw,
    triton_entry,
    triton_few_rows,
    triton_heads,
    triton_norm,
    triton_rotary,
    triton_some_rows,
)
from llmkit_kernels.torch_table import TorchKernels


class TritonKernels(TorchKernels):
    """Operands whose last dimension is not dense take the reference's operations."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if triton_few_rows.takes(x, weight):
            return triton_few_rows.linear(x, weight, bias)
        if triton_some_rows.takes(x, weight):
            return triton_some_rows.linear(x, weight, bias)
        return super().linear(x, weight, bias)

    def linear_in_parts(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        if bias is not None or triton_few_rows.takes(x, weight) or not triton_some_rows.takes_in_parts(x, weight):
            return None
        return triton_some_rows.linear_in_parts(x, weight)

    def add_rms_norm_linear(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not triton_few_rows.takes_norm(x, residual, norm, weight):
            return None
        return triton_few_rows.normed_linear(x, residual, norm, eps, weight, bias)

    def add_rms_norm_silu(
        self, x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if triton_few_rows.takes_norm(x, residual, norm, weight):
            return triton_few_rows.normed_silu(x, residual, norm, eps, weight)
        few = triton_few_rows.takes(residual, weight)
        if not few and not triton_some_rows.takes(residual, weight):
            return None
        normed, total = self.add_rms_norm(x, residual, norm, eps)
        silu_linear = triton_few_rows.silu_linear if few else triton_some_rows.silu_linear
        return silu_linear(normed, weight), total

    def embedding_norm(
        self, ids: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if weight.stride(-1) != 1 or not ids.is_contiguous():
            return None
        return triton_norm.embedding_norm(ids, weight, norm, eps)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.stride(-1) != 1 or x.dim() not in (2, 3):
            return super().rms_norm(x, weight, eps)
        return triton_norm.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        in_parts = x.dim() == 3
        if not in_parts and not (x.is_contiguous() and residual.is_contiguous() and x.dtype == residual.dtype):
            return super().add_rms_norm(x, residual, weight, eps)
        return triton_norm.add_rms_norm(x, residual, weight, eps)

    def rotary(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor, head_size: int
    ) -> None:
        if query.stride(-1) != 1 or key.stride(-1) != 1 or not cos_sin.is_contiguous():
            super().rotary(positions, query, key, cos_sin, head_size)
            return
        triton_rotary.rotary(positions, query, key, cos_sin, head_size)

    def rotary_and_write(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos_sin: torch.Tensor,
        norms: HeadNorms | None,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> bool:
        if any(x.stride(-1) != 1 for x in (query, key, value, kv_cache)) or not cos_sin.is_contiguous():
            return False
        if kv_cache.stride(3) != kv_cache.shape[4]:
            return False
        triton_heads.rotary_and_write(positions, query, key, value, cos_sin, norms, kv_cache, slots)
        return True

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        if gate_up.dim() != 2 or gate_up.stride(-1) != 1:
            return super().silu_and_mul(gate_up)
        return triton_activation.silu_and_mul(gate_up)

    def enter_step(
        self, input_ids: torch.Tensor, last_tokens: torch.Tensor, slots: torch.Tensor, parameters: DrawParameters
    ) -> tuple[torch.Tensor, DrawParameters]:
        return triton_entry.enter_step(input_ids, last_tokens, slots, parameters)

    def draw(self, logits: torch.Tensor, draws: DeviceDraws) -> torch.Tensor:
        return triton_draw.draw(logits, draws)
