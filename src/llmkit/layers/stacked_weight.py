"""The weight matrix of a layer: arrives in shards, is packed as soon as it is complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from llmkit.layers.module import WeightSlot
from llmkit.recycled_memory import passing_tensor

if TYPE_CHECKING:
    from llmkit.layers.context import ModelContext
    from llmkit.layers.norm import RMSNorm


@dataclass(frozen=True)
class Shard:
    """Consecutive rows of a weight that arrive as one tensor.

    name: the checkpoint's name of the module that the tensor belongs to, beside the layer's own; None: the layer's
    own. checkpoint_rows: rows of that tensor. rows: those that this worker keeps.
    """

    name: str | None
    checkpoint_rows: int
    rows: slice

    @property
    def num_rows(self) -> int:
        return int(self.rows.stop - self.rows.start)

    def path(self, layer_path: str) -> str:
        """Path of the module in the checkpoint, for a layer that stands at `layer_path` in the model."""
        if self.name is None:
            return layer_path
        parent, dot, _ = layer_path.rpartition(".")
        return f"{parent}{dot}{self.name}"


class StackedWeight:
    """A matrix [n, k] made of shards stacked on each other: in full precision (`plain`), in full precision as the
    kernel table likes it (`arranged`), or packed by the quantization (`packed`).

    Nothing is allocated before the first shard arrives, so layers can be built on any device at no cost, the meta
    device included. While a model loads, at most one matrix exists both in full precision and packed.
    """

    def __init__(
        self,
        context: ModelContext,
        shards: Sequence[Shard],
        in_features: int,
        *,
        columns: slice | None = None,
        role: str = "linear",
    ) -> None:
        """in_features: columns of the checkpoint's tensors; `columns`: those that this worker keeps, None: all.
        role: as for `QuantizationMethod.pack`."""
        self.shards = tuple(shards)
        self.in_features = in_features
        self.columns = columns or slice(0, in_features)
        self.role = role
        self.shape = (sum(s.num_rows for s in shards), int(self.columns.stop - self.columns.start))
        self.plain: torch.Tensor | None = None
        self.arranged: Any | None = None
        self.packed: Any | None = None
        self._missing: set[int] = set()
        self._dtype = context.dtype
        self._device = context.device
        self._kernels = context.kernels
        self._quantization = context.quantization

    @property
    def complete(self) -> bool:
        """Whether all shards have arrived."""
        return not self._missing and any(form is not None for form in (self.plain, self.arranged, self.packed))

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [t, k] → [t, n]."""
        if self.plain is not None:
            return self._kernels.linear(x, self.plain, bias)
        if self.arranged is not None:
            return self._kernels.arranged_linear(x, self.arranged, bias)
        return self._quantization.linear(x, self.packed, bias, self._kernels)

    def in_parts(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """`KernelTable.linear_in_parts`; None also where the matrix is not in full precision as it came."""
        return None if self.plain is None else self._kernels.linear_in_parts(x, self.plain, bias)

    def after_norm(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`KernelTable.add_rms_norm_linear`, or the quantization's; None also where the matrix was arranged."""
        if norm.weight is None:
            return None
        if self.packed is not None:
            return self._quantization.add_rms_norm_linear(
                x, residual, norm.weight, norm.eps, self.packed, bias, self._kernels
            )
        if self.plain is None:
            return None
        return self._kernels.add_rms_norm_linear(x, residual, norm.weight, norm.eps, self.plain, bias)

    def silu_after_norm(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`KernelTable.add_rms_norm_silu` likewise."""
        if norm.weight is None:
            return None
        if self.packed is not None:
            return self._quantization.add_rms_norm_silu(x, residual, norm.weight, norm.eps, self.packed, self._kernels)
        if self.plain is None:
            return None
        return self._kernels.add_rms_norm_silu(x, residual, norm.weight, norm.eps, self.plain)

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` int64 [t] → [t, k]."""
        if self.packed is None:
            return self._kernels.embedding(ids, self.plain)  # type: ignore[arg-type]
        return self._quantization.embedding(ids, self.packed, self._dtype)

    def embedding_norm(self, ids: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(norm of rows `ids` int64 [t], these rows), both [t, k], in one kernel; None where there is none for them."""
        if self.packed is not None or self.plain is None or norm.weight is None:
            return None
        return self._kernels.embedding_norm(ids, self.plain, norm.weight, norm.eps)

    def nbytes(self) -> int:
        """Bytes the matrix takes once loaded."""
        return self._quantization.nbytes(*self.shape, self.role, self._dtype)

    def slots(self) -> list[WeightSlot]:
        """A slot for each shard, in order; what was loaded before is dropped."""
        self.plain = self.arranged = self.packed = None
        self._missing = set(range(len(self.shards)))
        return [
            WeightSlot((shard.checkpoint_rows, self.in_features), partial(self._load, i))
            for i, shard in enumerate(self.shards)
        ]

    def _load(self, index: int, tensor: torch.Tensor) -> None:
        if self._can_keep(tensor):
            self.plain = tensor
        else:
            if self.plain is None:
                self.plain = self._empty()
            start = sum(s.num_rows for s in self.shards[:index])
            shard = self.shards[index]
            self.plain[start : start + shard.num_rows].copy_(tensor[shard.rows, self.columns])
        self._missing.discard(index)
        if self._missing:
            return
        self.packed = self._quantization.pack(self.plain, self.role)
        if self.packed is None and self.role != "embedding":
            self.arranged = self._kernels.arrange(self.plain, self.role)
        if self.packed is not None or self.arranged is not None:
            self.plain = None

    def _empty(self) -> torch.Tensor:
        if self._device.type == "cpu":
            return passing_tensor(self.shape, self._dtype)  # most kinds of weight are packed into memory of their own
        return torch.empty(self.shape, dtype=self._dtype, device=self._device)

    def _can_keep(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is the whole matrix as it is to be held, in memory of its own: then a copy would only
        double the largest weight for a moment."""
        return (
            len(self.shards) == 1
            and tuple(tensor.shape) == self.shape
            and tensor.dtype is self._dtype
            and tensor.device == self._device
            and tensor.is_contiguous()
            and tensor.untyped_storage().nbytes() == tensor.nbytes
        )
