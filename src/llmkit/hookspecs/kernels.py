"""Kind `kernels`: the table of fused operations that layers call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmkit.hookspecs.markers import hookspec

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

    from llmkit.sampling.device_draw import DeviceDraws, DrawParameters


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of every query and every key head before they are rotated; weights [head_size]."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


class KernelTable(ABC):
    """Operations on [tokens, features] tensors. Unless said otherwise they return new tensors.

    A table may subclass the reference table and replace single operations; every operation must agree with the
    reference up to rounding.
    """

    @abstractmethod
    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [t, k], weight [n, k], bias [n] → [t, n]."""

    def arrange(self, weight: torch.Tensor, role: str) -> Any | None:
        """Once, at load time: a weight [n, k] in full precision → the same numbers in whatever order and memory this
        table multiplies with best, which then replace it; None for "keep it as it is". `role` is "linear" or
        "lm_head"; the embedding and a head that is tied to it stay as they are."""
        return None

    def arranged_linear(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`linear` with what `arrange` has returned."""
        raise TypeError(f"{type(self).__name__} arranges no weights")

    def linear_in_parts(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """`linear` as what is to be added up: float32 [parts, t, n]. This table's `add_rms_norm` and the fused
        operations that begin with it take that for x as well. None: nothing was done, as it does not pay or the table
        does not take such operands."""
        return None

    @abstractmethod
    def embedding(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """ids int64 [t], weight [vocabulary, k] → [t, k]."""

    def embedding_norm(
        self, ids: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(`rms_norm` of what `embedding` returns, that itself), both [t, k]. None: nothing was done, as one kernel for
        both does not pay or does not take such operands."""
        return None

    @abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., d] / sqrt(mean(x²) + eps) * weight, the mean in float32. `weight` is of x's type or float32; with
        float32 the product is taken in it and rounded to x's type once."""

    @abstractmethod
    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual), both [t, d]. May overwrite `x` and `residual`. A table with
        `linear_in_parts` takes its results for x, too."""

    def add_rms_norm_linear(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(linear(rms_norm(x + residual, norm), weight, bias), x + residual) in one kernel, which may round what it
        multiplies elsewhere than the two operations do. x, residual [t, k], norm [k], weight [n, k], bias [n]. None:
        nothing was done, as one kernel for all of it does not pay or does not take such operands."""
        return None

    def add_rms_norm_silu(
        self, x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """As `add_rms_norm_linear`, of weight [2d, k], and `silu_and_mul` of the product: ([t, d], x + residual)."""
        return None

    @abstractmethod
    def rotary(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor, head_size: int
    ) -> None:
        """Rotate `query` [t, heads*head_size] and `key` [t, kv_heads*head_size] in place (both may be views with
        a row stride), half-split ("NeoX") pairing. cos_sin [max_position, rotary_dim]: cosines, then sines;
        rotary_dim <= head_size, the rest of each head is left alone."""

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
        """`rms_norm` of the heads of query and key (norms None: none), `rotary`, and keys and values into the cache.

        query [t, heads*head_size], key and value [t, kv_heads*head_size] may be views with a row stride; query is
        overwritten with the result, key may be. kv_cache [pages, 2, kv_heads, page_size, head_size], keys before
        values; slots int64[n], n <= t: page * page_size + offset of the first n tokens, negative: not written.
        False: nothing was done, as one kernel for all of it does not pay or does not take such operands."""
        return False

    @abstractmethod
    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [t, 2d] → silu(gate) * up, [t, d]."""

    @abstractmethod
    def gelu_tanh_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [t, 2d] → gelu(gate, approximate="tanh") * up, [t, d]."""

    def enter_step(
        self, input_ids: torch.Tensor, last_tokens: torch.Tensor, slots: torch.Tensor, parameters: DrawParameters
    ) -> tuple[torch.Tensor, DrawParameters] | None:
        """What a step on a GPU looks up first: input_ids int64 [t] with last_tokens[-1 - id] in the place of every id
        below 0, and those of `parameters`, of all slots, at `slots` int64 [n]. None for "torch's operations will do".
        Must not wait for the device."""
        return None

    def draw(self, logits: torch.Tensor, draws: DeviceDraws) -> torch.Tensor | None:
        """logits [n, v], float32 or of the model's type → token ids int64 [n] as
        `llmkit.sampling.device_draw.draw_or_best` for the same in float32, and noted down where `draws.last_tokens`
        says; None for "that one will do". Must not wait for the device."""
        return None


@hookspec(firstresult=True)
def llmkit_kernels(options: BaseModel | None) -> KernelTable:  # type: ignore[empty-body]
    """Build the table. `options` is an instance of `info.options`, validated; None if there is none.

    .. versionadded:: 0.1
    """
