from __future__ import annotations

import pytest
import torch

from llmkit.kv_cache.layout import KVCacheLayout, KVSpec, group_layers

FULL = KVSpec(2, 8, torch.float32)
SLIDING = KVSpec(2, 8, torch.float32, sliding_window=32)


def test_one_kind_of_layer_is_one_group():
    (group,) = group_layers(dict.fromkeys(range(4), FULL))
    assert group.layers == (0, 1, 2, 3)


def test_kinds_are_cut_to_the_size_of_the_rarest():
    groups = group_layers({layer: FULL if layer % 3 == 2 else SLIDING for layer in range(6)})
    assert [group.layers for group in groups] == [(0, 1), (3, 4), (2, 5)]
    layout = KVCacheLayout(groups, num_blocks=8, block_size=16, page_size=8)
    assert layout.num_tensors == 2
    assert layout.pages_per_block == 2
    assert layout.block_bytes == 2 * 16 * FULL.bytes_per_token
    assert layout.group_of_layer()[5] == 2
    assert layout.tensor_of_layer()[5] == 1


def test_layers_of_different_size_cannot_share():
    with pytest.raises(ValueError, match="different KV bytes"):
        group_layers({0: FULL, 1: KVSpec(4, 8, torch.float32)})


def test_no_attention_layers():
    layout = KVCacheLayout(group_layers({}), num_blocks=2, block_size=16, page_size=16)
    assert (layout.num_tensors, layout.block_bytes) == (0, 0)
