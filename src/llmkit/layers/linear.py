"""Linear layers, parallel- and quantization-aware: every worker holds its part of each weight.

Column-parallel layers split the output features, row-parallel ones the input features and add the parts up, so a
block of one of each needs a single exchange. Source: Shoeybi et al., "Megatron-LM" (2019), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from llmkit.errors import ModelError
from llmkit.layers.module import Module, WeightSlot, stacked_slot
from llmkit.layers.stacked_weight import Shard, StackedWeight

if TYPE_CHECKING:
    from llmkit.layers.context import ModelContext, ParallelLayout
    from llmkit.layers.norm import RMSNorm


def rank_slice(size: int, parallel: ParallelLayout, what: str) -> slice:
    """The part of `size` features that this worker holds. Raises ModelError if they cannot be dealt out evenly."""
    if size % parallel.world_size:
        raise ModelError(f"{what} of {size} cannot be split evenly over {parallel.world_size} workers.")
    part = size // parallel.world_size
    return slice(parallel.rank * part, (parallel.rank + 1) * part)


class Linear(Module):
    """y = x Wᵀ + b on this worker's part of W; by itself, without `columns` and partial shards, the whole W.

    fused: the checkpoint has all shards as one tensor, under this layer's own name.
    """

    def __init__(
        self,
        context: ModelContext,
        in_features: int,
        shards: Sequence[Shard] | int,
        *,
        bias: bool = False,
        columns: slice | None = None,
        role: str = "linear",
        fused: bool = False,
    ) -> None:
        """shards: the parts that W is stacked from, or simply the number of output features."""
        super().__init__()
        if isinstance(shards, int):
            shards = [Shard(None, shards, slice(0, shards))]
        self.weight = StackedWeight(context, shards, in_features, columns=columns, role=role)
        self.bias: torch.Tensor | None = None
        self.has_bias = bias
        self.fused = fused
        self._dtype = context.dtype
        self._device = context.device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [t, in_features] → [t, out_features], both this worker's part."""
        return self.weight.linear(x, self.bias)

    def after_norm(self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(`forward` of norm(x + residual), x + residual), in one kernel where the kernel table has one; x and residual
        [t, in_features] may be overwritten."""
        done = self.weight.after_norm(norm, x, residual, self.bias)
        if done is not None:
            return done
        normed, total = norm.add(x, residual)
        return self.forward(normed), total

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        start = 0
        self.bias = None
        weights = self.weight.slots()
        biases: list[WeightSlot] = []
        for shard in self.weight.shards:
            biases.append(WeightSlot((shard.checkpoint_rows,), partial(self._load_bias, shard, start)))
            start += shard.num_rows
        names = [shard.path(path) for shard in self.weight.shards]
        if self.fused:
            names, weights, biases = [path], [stacked_slot(weights)], [stacked_slot(biases)]
        yield from zip((f"{name}.weight" for name in names), weights, strict=True)
        if self.has_bias:
            yield from zip((f"{name}.bias" for name in names), biases, strict=True)

    def parameter_bytes(self) -> int:
        bias = self.weight.shape[0] * self._dtype.itemsize if self.has_bias else 0
        return self.weight.nbytes() + bias

    def _load_bias(self, shard: Shard, start: int, tensor: torch.Tensor) -> None:
        if self.bias is None:
            self.bias = torch.empty(self.weight.shape[0], dtype=self._dtype, device=self._device)
        self.bias[start : start + shard.num_rows].copy_(tensor[shard.rows])


class MergedColumnParallelLinear(Linear):
    """Several column-parallel layers on the same input as one product; the checkpoint has them one by one."""

    def __init__(
        self,
        context: ModelContext,
        in_features: int,
        outputs: Mapping[str, int],
        *,
        bias: bool = False,
        fused: bool = False,
    ) -> None:
        """outputs: name in the checkpoint → output features, in the order in which they are concatenated."""
        shards = [Shard(name, n, rank_slice(n, context.parallel, name)) for name, n in outputs.items()]
        super().__init__(context, in_features, shards, bias=bias, fused=fused)


class ColumnParallelLinear(Linear):
    """A layer whose output features are dealt out to the workers."""

    def __init__(self, context: ModelContext, in_features: int, out_features: int, *, bias: bool = False) -> None:
        rows = rank_slice(out_features, context.parallel, "A linear layer's output")
        super().__init__(context, in_features, [Shard(None, out_features, rows)], bias=bias)


class QKVParallelLinear(Linear):
    """The projections to queries, keys and values as one product; whole heads are dealt out to the workers.

    With more workers than KV heads every KV head is held by several workers.
    """

    def __init__(
        self,
        context: ModelContext,
        hidden_size: int,
        head_size: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        bias: bool = False,
        fused: bool = False,
        names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj"),
    ) -> None:
        parallel = context.parallel
        heads = rank_slice(num_heads, parallel, "A number of attention heads")
        if num_kv_heads >= parallel.world_size:
            kv_heads = rank_slice(num_kv_heads, parallel, "A number of KV heads")
        elif parallel.world_size % num_kv_heads:
            raise ModelError(f"{num_kv_heads} KV heads cannot be shared evenly by {parallel.world_size} workers.")
        else:
            first = parallel.rank * num_kv_heads // parallel.world_size
            kv_heads = slice(first, first + 1)
        parts = (heads, kv_heads, kv_heads)
        totals = (num_heads, num_kv_heads, num_kv_heads)
        shards = [
            Shard(name, total * head_size, slice(part.start * head_size, part.stop * head_size))
            for name, total, part in zip(names, totals, parts, strict=True)
        ]
        super().__init__(context, hidden_size, shards, bias=bias, fused=fused)
        self.num_heads = heads.stop - heads.start
        self.num_kv_heads = kv_heads.stop - kv_heads.start
        self.split_sizes = [shard.num_rows for shard in shards]


class RowParallelLinear(Linear):
    """A layer whose input features are dealt out to the workers; the partial products are added up."""

    def __init__(self, context: ModelContext, in_features: int, out_features: int, *, bias: bool = False) -> None:
        columns = rank_slice(in_features, context.parallel, "A linear layer's input")
        shards = [Shard(None, out_features, slice(0, out_features))]
        super().__init__(context, in_features, shards, bias=bias, columns=columns)
        self._all_reduce = context.parallel.all_reduce if context.parallel.world_size > 1 else None
        self._adds_bias = context.parallel.rank == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [t, this worker's input features] → [t, out_features], complete on every worker."""
        if self._all_reduce is None:
            return self.weight.linear(x, self.bias)
        return self._all_reduce(self.weight.linear(x, self.bias if self._adds_bias else None))

    def before_norm(self, x: torch.Tensor) -> torch.Tensor:
        """`forward` for `RMSNorm.add` or `Linear.after_norm` alone: float32 [parts, t, out_features], not added up yet,
        where the kernel table has such a product."""
        if self._all_reduce is None:
            parts = self.weight.in_parts(x, self.bias)
            if parts is not None:
                return parts
        return self.forward(x)


def added_up(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `RowParallelLinear.before_norm` returns → as of `forward`, [t, out_features] of `dtype`."""
    return x if x.dim() == 2 else x.sum(0).to(dtype)
