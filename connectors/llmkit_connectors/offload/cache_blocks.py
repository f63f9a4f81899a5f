"""The bytes of a block in the KV cache, and how they come to a contiguous piece of host memory and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from llmkit.errors import PluginError

if TYPE_CHECKING:
    from llmkit.kv_cache.layout import KVCacheLayout

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
"""A contiguous, one-dimensional piece of host memory."""

BlockCopy = tuple[int, Bytes]
"""An allocation block, and the host memory of its payload."""


class CacheBlocks(ABC):
    """Copies whole blocks. The payload of a block of KV group g is what the layers of g keep of it, one layer after
    another.

    Calls for different blocks may come from several threads; a call returns when its bytes are in place.
    """

    def __init__(self, layout: KVCacheLayout, kv_caches: Sequence[torch.Tensor]) -> None:
        """Raises PluginError if the attention backend does not keep the pages of a block together."""
        caches = [_by_block(cache, layout) for cache in kv_caches]
        self._layers = [[caches[layer] for layer in group.layers] for group in layout.groups]
        self.payload_bytes = [sum(layer.shape[1] for layer in layers) for layers in self._layers]
        """Per KV group."""

    @abstractmethod
    def save(self, group: int, copies: Sequence[BlockCopy]) -> None:
        """From the cache to the host. What was computed by steps that have ended is in the blocks."""

    @abstractmethod
    def restore(self, group: int, copies: Sequence[BlockCopy]) -> None:
        """From the host to the cache."""


class HostCacheBlocks(CacheBlocks):
    """The cache lies in host memory too."""

    def __init__(self, layout: KVCacheLayout, kv_caches: Sequence[torch.Tensor]) -> None:
        super().__init__(layout, kv_caches)
        self._arrays = [[layer.numpy() for layer in layers] for layers in self._layers]

    def save(self, group: int, copies: Sequence[BlockCopy]) -> None:
        for block, payload in copies:
            start = 0
            for layer in self._arrays[group]:
                end = start + layer.shape[1]
                payload[start:end] = layer[block]
                start = end

    def restore(self, group: int, copies: Sequence[BlockCopy]) -> None:
        for block, payload in copies:
            start = 0
            for layer in self._arrays[group]:
                end = start + layer.shape[1]
                layer[block] = payload[start:end]
                start = end


class DeviceCacheBlocks(CacheBlocks):
    """The cache lies on a CUDA device.

    Layers are gathered on the device first, so that every block crosses the bus in one piece, on streams of their own:
    the step goes on meanwhile.
    """

    def __init__(self, layout: KVCacheLayout, kv_caches: Sequence[torch.Tensor]) -> None:
        super().__init__(layout, kv_caches)
        device = kv_caches[0].device
        self._saving = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._restoring = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def save(self, group: int, copies: Sequence[BlockCopy]) -> None:
        layers = self._layers[group]
        device = layers[0].device
        with torch.inference_mode(), torch.cuda.stream(self._saving):
            blocks = torch.tensor([block for block, _ in copies], device=device)
            gathered = torch.cat([layer.index_select(0, blocks) for layer in layers], dim=1)
            for row, (_, payload) in zip(gathered, copies, strict=True):
                torch.from_numpy(payload).copy_(row, non_blocking=True)
            self._saving.synchronize()

    def restore(self, group: int, copies: Sequence[BlockCopy]) -> None:
        layers = self._layers[group]
        device = layers[0].device
        with torch.inference_mode(), torch.cuda.stream(self._restoring):
            blocks = torch.tensor([block for block, _ in copies], device=device)
            gathered = torch.empty((len(copies), self.payload_bytes[group]), dtype=torch.uint8, device=device)
            for row, (_, payload) in zip(gathered, copies, strict=True):
                row.copy_(torch.from_numpy(payload), non_blocking=True)
            start = 0
            for layer in layers:
                end = start + layer.shape[1]
                layer.index_copy_(0, blocks, gathered[:, start:end])
                start = end
            self._restoring.synchronize()


def cache_blocks(layout: KVCacheLayout, kv_caches: Sequence[torch.Tensor]) -> CacheBlocks:
    """The copies for wherever the cache lies."""
    kind = DeviceCacheBlocks if kv_caches[0].device.type == "cuda" else HostCacheBlocks
    return kind(layout, kv_caches)


def _by_block(cache: torch.Tensor, layout: KVCacheLayout) -> torch.Tensor:
    """The cache of a layer as bytes [num_blocks, bytes of a block]."""
    pages = layout.num_blocks * layout.pages_per_block
    try:
        return cache[:pages].view(layout.num_blocks, -1).view(torch.uint8)
    except RuntimeError as error:
        raise PluginError(
            f"The attention backend's cache of shape {tuple(cache.shape)} does not keep the bytes of a page together.",
            hint="The offload connector cannot copy such blocks; choose another attention plugin with --attention.",
        ) from error
