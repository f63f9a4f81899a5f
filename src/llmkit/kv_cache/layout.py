"""How the KV cache is cut up: what each layer stores, layers in groups, groups over shared tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class KVSpec:
    """What one attention layer stores per token. `sliding_window` in tokens; None: the whole sequence."""

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    sliding_window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_size * self.dtype.itemsize


@dataclass(frozen=True)
class KVGroup:
    """Layers that share one block table because they keep the same tokens. `layers` are attention-layer
    indices."""

    spec: KVSpec
    layers: tuple[int, ...]


@dataclass(frozen=True)
class KVCacheLayout:
    """The whole cache.

    All groups draw from one pool of `num_blocks` blocks of `block_size` tokens; block 0 is never handed out
    (the null block, for positions that a sliding window has left behind). There are `num_tensors` tensors,
    each of num_blocks * block_size tokens; the i-th layer of every group uses tensor i, so a block id means
    the same storage in every group and is owned by one group at a time. page_size: the kernel's page in
    tokens; block_size is a multiple of it. num_host_blocks: blocks of host memory to which preempted sequences can be
    swapped out, numbered from 0.
    """

    groups: tuple[KVGroup, ...]
    num_blocks: int
    block_size: int
    page_size: int
    enable_prefix_caching: bool = True
    num_host_blocks: int = 0

    @property
    def num_tensors(self) -> int:
        return max((len(group.layers) for group in self.groups), default=0)

    @property
    def pages_per_block(self) -> int:
        return self.block_size // self.page_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all tensors."""
        if not self.groups:
            return 0
        return self.num_tensors * self.block_size * self.groups[0].spec.bytes_per_token

    def tensor_of_layer(self) -> dict[int, int]:
        """Attention-layer index → tensor index."""
        return {layer: i for group in self.groups for i, layer in enumerate(group.layers)}

    def group_of_layer(self) -> dict[int, int]:
        """Attention-layer index → group index."""
        return {layer: g for g, group in enumerate(self.groups) for layer in group.layers}


def group_layers(specs: dict[int, KVSpec]) -> tuple[KVGroup, ...]:
    """Group attention layers by what they keep.

    With one kind of layer: one group. With full and sliding-window layers: every kind is cut into groups of
    the size of the rarest kind, so that all groups have (nearly) as many layers as there are tensors and any
    block can serve any group. All specs must have the same bytes per token; raises ValueError otherwise.
    """
    kinds: dict[KVSpec, list[int]] = {}
    for layer, spec in sorted(specs.items()):
        kinds.setdefault(spec, []).append(layer)
    if len({spec.bytes_per_token for spec in kinds}) > 1:
        raise ValueError("attention layers with different KV bytes per token cannot share one block pool")
    if not kinds:
        return ()
    size = min(len(layers) for layers in kinds.values())
    return tuple(
        KVGroup(spec, tuple(layers[i : i + size]))
        for spec, layers in kinds.items()
        for i in range(0, len(layers), size)
    )
