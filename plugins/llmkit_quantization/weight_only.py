"""Weight-only quantization for the CPU: codes in memory, float32 products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from llmkit.errors import ModelError
from llmkit.hookspecs.kernels import KernelTable
from llmkit.hookspecs.quantization import QuantizationMethod
from llmkit_quantization import cpu_int4, cpu_int8


class CodeFormat(Protocol):
    """What `cpu_int4` and `cpu_int8` are: see there."""

    GROUP: int

    def quantize(self, weight: torch.Tensor) -> Any: ...
    def linear(self, x: torch.Tensor, packed: Any, bias: torch.Tensor | None = None) -> torch.Tensor: ...
    def embedding(self, ids: torch.Tensor, packed: Any) -> torch.Tensor: ...


@dataclass(frozen=True)
class Format:
    """A way to hold a weight. group_bytes: of a group of `code.GROUP` elements of a row; limit: of the values."""

    name: str
    code: CodeFormat
    group_bytes: int
    limit: float


INT8 = Format("int8", cpu_int8, group_bytes=34, limit=8e6)
INT4 = Format("int4", cpu_int4, group_bytes=20, limit=65504.0)


@dataclass(frozen=True)
class PackedWeight:
    """A weight and the format that it is in."""

    format: Format
    data: Any


class WeightOnly(QuantizationMethod):
    """Holds each weight in the format that its role is mapped to; None leaves it in full precision."""

    def __init__(self, formats: Mapping[str, Format | None]) -> None:
        self.formats = dict(formats)

    def pack(self, weight: torch.Tensor, role: str) -> PackedWeight | None:
        """Raises ModelError for values that the format cannot hold, NaN and infinity included."""
        chosen = self.formats[role]
        if chosen is None:
            return None
        # Not abs(): that would be one more copy of the largest weight.
        least, most = (float(value) for value in weight.aminmax())
        largest = max(-least, most) if least == least else least
        if not largest < chosen.limit:
            raise ModelError(
                f"A weight of {list(weight.shape)} ({role}) has values up to {largest:g}; {chosen.name} can hold "
                f"less than {chosen.limit:g}.",
                hint="Use --quantization none.",
            )
        return PackedWeight(chosen, chosen.code.quantize(weight))

    def linear(
        self,
        x: torch.Tensor,
        packed: PackedWeight,
        bias: torch.Tensor | None,
        kernels: KernelTable,  # noqa: ARG002
    ) -> torch.Tensor:
        return packed.format.code.linear(x, packed.data, bias)

    def embedding(self, ids: torch.Tensor, packed: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
        return packed.format.code.embedding(ids, packed.data).to(dtype)

    def nbytes(self, n: int, k: int, role: str, dtype: torch.dtype) -> int:
        chosen = self.formats[role]
        if chosen is None:
            return n * k * dtype.itemsize
        return n * -(-k // chosen.code.GROUP) * chosen.group_bytes
