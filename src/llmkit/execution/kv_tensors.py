"""The memory of the KV cache: tensors, one view per attention layer, and copies of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from llmkit.errors import PluginError
from llmkit.execution.host_blocks import HostBlocks
from llmkit.mapped_memory import lazy_zeros

if TYPE_CHECKING:
    from llmkit.hookspecs.attention import AttentionBackend
    from llmkit.kv_cache.layout import KVCacheLayout


class KVTensors:
    """`layers[i]` is the cache of attention layer i, of the shape that the backend asked for.

    Layers of different groups share storage, as `KVCacheLayout` says: a block id means the same bytes to all.
    On the CPU, memory is committed when a block is first written. The swap space on the host belongs to it.
    """

    def __init__(self, layout: KVCacheLayout, backend: AttentionBackend, device: torch.device) -> None:
        num_pages = layout.num_blocks * layout.pages_per_block
        shapes = {
            group: backend.kv_shape(num_pages, layout.page_size, kind.spec.num_kv_heads, kind.spec.head_size)
            for group, kind in enumerate(layout.groups)
        }
        self._block_bytes = block_bytes(layout, backend)
        self._storages = [_zeros(layout.num_blocks * self._block_bytes, device) for _ in range(layout.num_tensors)]
        self._blocks = [storage.view(-1, self._block_bytes) for storage in self._storages]
        self._host = HostBlocks(layout.num_host_blocks, self._block_bytes, len(self._blocks), device)
        group_of, tensor_of = layout.group_of_layer(), layout.tensor_of_layer()
        self.layers = [
            _view(self._storages[tensor_of[layer]], layout.groups[group_of[layer]].spec.dtype, shapes[group_of[layer]])
            for layer in sorted(tensor_of)
        ]

    @property
    def nbytes(self) -> int:
        return sum(storage.numel() for storage in self._storages)

    def first_blocks(self, count: int) -> list[tuple[int, int]]:
        """(address, bytes) in each storage of the first `count` blocks that the pool gives out, and the null block."""
        nbytes = min(count + 1, len(self._blocks[0]) if self._blocks else 0) * self._block_bytes
        return [(storage.data_ptr(), nbytes) for storage in self._storages]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks, as if one after another."""
        if not copies:
            return
        sources, destinations = zip(*copies, strict=True)
        if not set(sources).isdisjoint(destinations):
            # A block that is both read and written: order matters.
            for copy in copies:
                self._copy((copy[0],), (copy[1],))
            return
        self._copy(sources, destinations)

    def swap(self, out: Sequence[tuple[int, int]], back: Sequence[tuple[int, int]]) -> None:
        """Copy (device block, host block) pairs: first those that go `out` to the host, then those that come `back`."""
        if out:
            self._host.swap_out(self._blocks, out)
        if back:
            self._host.swap_in(self._blocks, back)

    def _copy(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        for blocks in self._blocks:
            source = torch.tensor(sources, device=blocks.device)
            blocks[torch.tensor(destinations, device=blocks.device)] = blocks[source]


def block_bytes(layout: KVCacheLayout, backend: AttentionBackend) -> int:
    """Bytes of one block of one tensor, with whatever padding the backend's shape has.

    Raises PluginError if it differs between groups: then a block id could not mean the same bytes to all.
    """
    pages, size = layout.pages_per_block, layout.page_size
    specs = [group.spec for group in layout.groups]
    sizes = {
        math.prod(backend.kv_shape(pages, size, spec.num_kv_heads, spec.head_size)) * spec.dtype.itemsize
        for spec in specs
    }
    if len(sizes) > 1:
        raise PluginError(
            f"{type(backend).__name__} stores blocks of different sizes ({sorted(sizes)} bytes) for this model's "
            "attention layers, so they cannot share one cache.",
            hint="Choose another attention plugin with --attention.",
        )
    return sizes.pop() if sizes else 0


def _zeros(size: int, device: torch.device) -> torch.Tensor:
    """Zeroed bytes. On the CPU from numpy, which asks the system for zero pages, so that untouched ones take no
    memory; torch.zeros would write them all."""
    if device.type == "cpu":
        return torch.from_numpy(lazy_zeros(size, np.uint8))
    return torch.zeros(size, dtype=torch.uint8, device=device)


def _view(storage: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return storage.view(dtype)[: math.prod(shape)].view(shape)
