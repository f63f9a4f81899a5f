"""Copies between a cache on a GPU and pinned host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmkit.kv_cache.layout import KVCacheLayout, KVGroup, KVSpec
from llmkit_connectors.offload.cache_blocks import DeviceCacheBlocks, cache_blocks
from llmkit_connectors.offload.host_memory import HostMemory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_come_back_from_pinned_memory(dtype: torch.dtype):
    layout = KVCacheLayout((KVGroup(KVSpec(2, 64, dtype), (0, 1, 2)),), num_blocks=40, block_size=16, page_size=8)
    caches = [torch.rand((80, 2, 8, 2, 64), device="cuda").to(dtype) for _ in range(3)]
    before = [cache.clone() for cache in caches]
    blocks = cache_blocks(layout, caches)
    assert isinstance(blocks, DeviceCacheBlocks)
    memory = HostMemory(40, blocks.payload_bytes[0], pinned=True)
    assert memory._pinned
    assert torch.from_numpy(memory.slot(0, 8)).is_pinned()
    copies = [(block, memory.slot(39 - block, blocks.payload_bytes[0])) for block in range(1, 40, 2)]
    blocks.save(0, copies)
    for cache in caches:
        cache[2:] = float("nan")
    blocks.restore(0, copies)
    for cache, expected in zip(caches, before, strict=True):
        for block in range(40):
            pages = slice(2 * block, 2 * block + 2)
            if block % 2 or not block:
                assert torch.equal(cache[pages], expected[pages])
            else:
                assert cache[pages].isnan().all()
    memory.close()
    memory.close()


def test_both_halves_on_a_gpu(make_rig: Callable[..., Any], tmp_path: Any):
    prompt = list(range(1, 42))
    rig = make_rig(url=str(tmp_path), device="cuda")
    assert rig.serve(prompt) == 0
    assert rig.serve(prompt) == 40
    assert make_rig(url=str(tmp_path)).serve(prompt) == 40
