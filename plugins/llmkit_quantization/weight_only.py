"""Weight-only quantization for the CPU: codes in memory; activations stay precise (`cpu_coded`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from llmkit.errors import ModelError
from llmkit.hookspecs.attention import Support
from llmkit.hookspecs.kernels import KernelTable
from llmkit.hookspecs.quantization import QuantizationMethod
from llmkit.mapped_memory import MappedMemory
from llmkit_quantization import cpu_int4, cpu_int8, cpu_packed
from llmkit_quantization.cpu_packed import Packed


@dataclass(frozen=True)
class Format:
    """A way to hold a weight. limit: of the size of its values. holds: types of GGUF whose numbers it holds, up to the
    rounding of scales and minima to float16."""

    name: str
    bits: int
    quantize: Callable[[torch.Tensor, MappedMemory], Packed]
    limit: float
    holds: frozenset[str]


INT8 = Format("int8", 8, cpu_int8.quantize, limit=8e6, holds=frozenset({"Q8_0"}))
INT4 = Format("int4", 4, cpu_int4.quantize, limit=65504.0, holds=frozenset({"Q4_0", "Q4_1"}))


class WeightOnly(QuantizationMethod):
    """Holds each weight in the format that its role is mapped to; None leaves it in full precision."""

    def __init__(self, formats: Mapping[str, Format | None]) -> None:
        self.formats = dict(formats)
        self._memory = MappedMemory()

    def support(self, stored: Mapping[str, frozenset[str]]) -> Support:
        """Better than full precision where it is as precise: a step reads a fraction of the memory."""
        changed = {
            type_name: role
            for role, chosen in self.formats.items()
            for type_name in sorted(stored.get(role, ()))
            if chosen is not None and type_name not in chosen.holds
        }
        if "linear" not in stored:
            return Support(reasons=("it would change the weights: it is used only when named",))
        if changed:
            what = ", ".join(f"{role} weights stored as {name}" for name, role in changed.items())
            return Support(reasons=(f"it would change {what}: it is used only when named",))
        names = " and ".join(sorted(stored["linear"]))
        return Support(score=1, grounds=f"weights stored as {names} keep their numbers, and a step reads less memory")

    def pack(self, weight: torch.Tensor, role: str) -> Packed | None:
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
        return chosen.quantize(weight, self._memory)

    def linear(
        self,
        x: torch.Tensor,
        packed: Packed,
        bias: torch.Tensor | None,
        kernels: KernelTable,  # noqa: ARG002
    ) -> torch.Tensor:
        return cpu_packed.linear(x, packed, bias)

    def embedding(self, ids: torch.Tensor, packed: Packed, dtype: torch.dtype) -> torch.Tensor:
        return cpu_packed.embedding(ids, packed).to(dtype)

    def nbytes(self, n: int, k: int, role: str, dtype: torch.dtype) -> int:
        chosen = self.formats[role]
        if chosen is None:
            return n * k * dtype.itemsize
        return cpu_packed.packed_bytes(n, k, chosen.bits)
