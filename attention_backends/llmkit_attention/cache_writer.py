"""Writing a step's keys and values with the Triton kernel, for backends whose own kernels only read the cache."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext

import torch

from llmkit_attention.triton_cache import write_launch
from llmkit_attention.triton_launch import PreparedLaunch


class CacheWriter:
    """Of one step: slot_mapping int64[t], negative where nothing is written. Launches only, so graphs can hold it."""

    def __init__(self, slot_mapping: torch.Tensor) -> None:
        self.slot_mapping = slot_mapping
        self._launches: dict[Hashable, PreparedLaunch] = {}

    def write(self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor) -> None:
        """key, value [t or more, kv_heads, head_size] into kv_cache [pages, 2, kv_heads, page_size, head_size]."""
        if not self.slot_mapping.shape[0]:
            return
        key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
        known = (key.dtype, kv_cache.dtype, key.stride(), value.stride(), kv_cache.stride())
        launch = self._launches.get(known)
        if launch is None:
            launch = self._launches[known] = write_launch(key, value, kv_cache, self.slot_mapping)
        with current(key.device):
            launch(key, value, kv_cache)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` the one that kernels are launched on, for the time being."""
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        return torch.cuda.device(device)
    return nullcontext()
