from __future__ import annotations

import pytest
import torch

from llmkit.errors import OutOfMemoryError, PluginError
from llmkit.kv_cache.layout import KVCacheLayout, KVGroup, KVSpec
from llmkit_connectors.offload.cache_blocks import cache_blocks
from llmkit_connectors.offload.host_memory import HostMemory


def test_slots_do_not_overlap():
    memory = HostMemory(3, 100, pinned=False)
    for number in range(3):
        memory.slot(number, 100)[:] = number
    assert [set(memory.slot(number, 40).tolist()) for number in range(3)] == [{0}, {1}, {2}]
    memory.close()


@pytest.mark.parametrize("slot_bytes", [1 << 40, 1 << 62])
def test_more_memory_than_there_is_is_refused(slot_bytes: int):
    with pytest.raises(OutOfMemoryError, match="host_gib"):
        HostMemory(64, slot_bytes, pinned=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_groups_with_different_numbers_of_layers(dtype: torch.dtype):
    spec, window = KVSpec(2, 8, dtype), KVSpec(2, 8, dtype, sliding_window=16)
    layout = KVCacheLayout((KVGroup(spec, (0, 2)), KVGroup(window, (1,))), num_blocks=6, block_size=4, page_size=2)
    storages = [torch.rand(12, 2, 2, 2, 8).to(dtype) for _ in range(2)]
    caches = [storages[0], storages[0], storages[1]]  # layers 0 and 1 share one
    blocks = cache_blocks(layout, caches)
    assert blocks.payload_bytes == [2 * 4 * spec.bytes_per_token, 4 * spec.bytes_per_token]
    memory = HostMemory(4, max(blocks.payload_bytes), pinned=False)
    before = [storage.clone() for storage in storages]
    blocks.save(0, [(1, memory.slot(3, blocks.payload_bytes[0])), (4, memory.slot(0, blocks.payload_bytes[0]))])
    blocks.save(1, [(2, memory.slot(1, blocks.payload_bytes[1]))])
    for storage in storages:
        storage.zero_()
    blocks.restore(0, [(1, memory.slot(3, blocks.payload_bytes[0])), (5, memory.slot(0, blocks.payload_bytes[0]))])
    blocks.restore(1, [(2, memory.slot(1, blocks.payload_bytes[1]))])
    for number, (storage, original) in enumerate(zip(storages, before, strict=True)):
        assert torch.equal(storage[2:4], original[2:4])
        assert torch.equal(storage[10:12], original[8:10])
        assert torch.equal(storage[4:6], original[4:6]) == (number == 0)
    memory.close()


def test_a_cache_whose_pages_are_scattered_is_refused():
    layout = KVCacheLayout((KVGroup(KVSpec(2, 8, torch.float32), (0,)),), num_blocks=6, block_size=4, page_size=4)
    cache = torch.zeros(2, 6, 4, 2, 8).transpose(0, 1)
    with pytest.raises(PluginError, match="together"):
        cache_blocks(layout, [cache])
