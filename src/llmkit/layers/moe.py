"""Mixture of experts: a router picks a few of many feed-forward blocks for every token.

Sources: Shazeer et al., "Outrageously Large Neural Networks" (2017); Jiang et al., "Mixtral of Experts" (2024). This is
the reference: tokens are sorted by expert and every expert that was picked multiplies its own rows. How many those are
is read from the device, so a forward pass cannot be one graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from llmkit.layers.activation import gated_activation
from llmkit.layers.linear import rank_slice
from llmkit.layers.module import Module, WeightSlot
from llmkit.layers.stacked_weight import Shard, StackedWeight

if TYPE_CHECKING:
    from llmkit.layers.config import ExpertOptions
    from llmkit.layers.context import ModelContext
    from llmkit.layers.norm import RMSNorm


class Router(Module):
    """Scores the experts for each token. Its small weight stays in full precision: which experts a token goes to
    hangs on differences that quantization would wipe out."""

    def __init__(self, context: ModelContext, options: ExpertOptions) -> None:
        super().__init__()
        self.shape = (options.num_experts, context.config.hidden_size)
        self.top_k = options.num_experts_per_tok
        self.renormalise = options.renormalise
        self.weight: torch.Tensor | None = None
        self._dtype = context.dtype
        self._device = context.device
        self._kernels = context.kernels

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [t, hidden_size] → weights float32 [t, top_k] and experts int64 [t, top_k], the best first."""
        scores = self._kernels.linear(x, self.weight).float().softmax(dim=-1)  # type: ignore[arg-type]
        weights, experts = torch.topk(scores, self.top_k, dim=-1)
        if self.renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, experts

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        self.weight = None
        yield f"{path}.weight", WeightSlot(self.shape, self._load)

    def parameter_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * self._dtype.itemsize

    def _load(self, tensor: torch.Tensor) -> None:
        self.weight = torch.empty(self.shape, dtype=self._dtype, device=self._device).copy_(tensor)


class ExpertWeight:
    """The same matrix [n, k] of every expert: `stacked` [experts, n, k] in full precision, or packed one by one where
    the quantization packs them. While a model loads, an expert's matrix exists twice for a moment only."""

    def __init__(
        self,
        context: ModelContext,
        num_experts: int,
        shards: Sequence[Shard],
        in_features: int,
        *,
        columns: slice | None = None,
    ) -> None:
        """The arguments are those of `StackedWeight`, for one expert."""
        self.of_expert = tuple(StackedWeight(context, shards, in_features, columns=columns) for _ in range(num_experts))
        self.stacked: torch.Tensor | None = None
        self._dtype = context.dtype
        self._device = context.device

    def nbytes(self) -> int:
        """Bytes that all matrices take once loaded."""
        return len(self.of_expert) * self.of_expert[0].nbytes()

    def slots(self, expert: int) -> list[WeightSlot]:
        """A slot for each shard of one expert's matrix."""
        self.stacked = None
        slots = self.of_expert[expert].slots()
        return [replace(slot, load=partial(self._load, expert, slot)) for slot in slots]

    def _load(self, expert: int, slot: WeightSlot, tensor: torch.Tensor) -> None:
        slot.load(tensor)
        weight = self.of_expert[expert]
        if not weight.complete or weight.plain is None:
            return
        if self.stacked is None:
            shape = (len(self.of_expert), *weight.shape)
            self.stacked = torch.empty(shape, dtype=self._dtype, device=self._device)
        weight.plain = self.stacked[expert].copy_(weight.plain)


class Experts(Module):
    """Gated feed-forward blocks, each on the tokens that were sent to it."""

    def __init__(self, context: ModelContext, options: ExpertOptions) -> None:
        super().__init__()
        hidden, inner = context.config.hidden_size, options.intermediate_size
        part = rank_slice(inner, context.parallel, "An expert's inner size")
        gate, up, down = options.names
        self.num_experts = options.num_experts
        self.top_k = options.num_experts_per_tok
        self.sizes = (hidden, inner)
        self.gate_up = ExpertWeight(
            context, self.num_experts, [Shard(gate, inner, part), Shard(up, inner, part)], hidden
        )
        whole = Shard(down, hidden, slice(0, hidden))
        self.down = ExpertWeight(context, self.num_experts, [whole], inner, columns=part)
        self._activation = gated_activation(context.kernels, context.config.activation)

    def forward(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """x [t, hidden_size]; weights [t, top_k] of the outputs of `experts` [t, top_k] → [t, hidden_size], what this
        worker's part of each expert contributes."""
        tokens, top_k = experts.shape
        flat = experts.flatten()
        order = torch.argsort(flat, stable=True)
        rows = x[order // top_k]
        outputs = torch.empty_like(rows)
        start = 0
        for expert, count in enumerate(torch.bincount(flat, minlength=self.num_experts).tolist()):
            if count:
                part = slice(start, start + count)
                inner = self._activation(self.gate_up.of_expert[expert].linear(rows[part], None))
                outputs[order[part]] = self.down.of_expert[expert].linear(inner, None)
                start += count
        return (outputs.view(tokens, top_k, x.shape[1]) * weights[..., None]).sum(dim=1).to(x.dtype)

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        for weight in (self.gate_up, self.down):
            for expert in range(self.num_experts):
                shards = weight.of_expert[expert].shards
                for shard, slot in zip(shards, weight.slots(expert), strict=True):
                    yield f"{path}.{expert}.{shard.name}.weight", slot

    def parameter_bytes(self) -> int:
        return self.gate_up.nbytes() + self.down.nbytes()

    def activation_width(self) -> int:
        hidden, inner = self.sizes
        return 3 * self.top_k * hidden + 3 * inner


class SparseMLP(Module):
    """A feed-forward block of experts: Σ weight * expert(x) over the experts that the router picks for x."""

    def __init__(self, context: ModelContext, options: ExpertOptions) -> None:
        super().__init__()
        self.gate = Router(context, options)
        self.experts = Experts(context, options)
        self._all_reduce = context.parallel.all_reduce if context.parallel.world_size > 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [t, hidden_size] → [t, hidden_size], complete on every worker."""
        output = self.experts.forward(x, *self.gate.forward(x))
        return output if self._all_reduce is None else self._all_reduce(output)

    def after_norm(self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(`forward` of norm(x + residual), x + residual); x and residual [t, hidden_size] may be overwritten."""
        normed, total = norm.add(x, residual)
        return self.forward(normed), total
