from __future__ import annotations

import dataclasses

import pytest

from llmkit.config import EngineConfig
from llmkit.config.sections import KVCacheConfig
from llmkit.errors import OutOfMemoryError
from llmkit.execution.measuring import HostMemory, host_use
from llmkit.execution.memory import GIB, MIB, CacheNeeds, MemoryUse, plan_host_blocks, plan_memory, readable

USE = MemoryUse(
    total=16 * GIB,
    usable=12 * GIB,
    weights=4 * GIB,
    activations=1 * GIB,
    other=2 * GIB,
    free=9 * GIB,
    utilization_key="gpu_memory_utilization",
)
NEEDS = CacheNeeds(block_bytes=MIB, block_size=16, blocks_per_sequence=256, max_num_seqs=100, max_model_len=4096)


def test_blocks_are_what_the_parts_leave():
    plan = plan_memory(USE, NEEDS, KVCacheConfig())
    assert plan.num_blocks == 5 * 1024
    assert plan.cache == 5 * GIB
    assert plan.limited_by == "memory (gpu_memory_utilization)"


def test_graphs_take_their_part():
    plan = plan_memory(dataclasses.replace(USE, graphs=GIB), NEEDS, KVCacheConfig())
    assert plan.num_blocks == 4 * 1024
    assert "1.00 GiB, graphs 1.00 GiB, everything else" in plan.describe()


def test_no_more_than_the_limits_can_use():
    plan = plan_memory(USE, dataclasses.replace(NEEDS, max_num_seqs=3), KVCacheConfig())
    assert plan.num_blocks == 3 * 256 + 1
    assert "max_num_seqs" in plan.limited_by
    assert "4096 tokens" in plan.limited_by


def test_sizes_that_were_set():
    assert plan_memory(USE, NEEDS, KVCacheConfig(num_blocks=7)).num_blocks == 7
    plan = plan_memory(USE, NEEDS, KVCacheConfig(memory_gib=0.5))
    assert plan.num_blocks == 512
    assert plan.limited_by == "the setting memory_gib"


def test_the_plan_in_words():
    text = plan_memory(USE, NEEDS, KVCacheConfig()).describe()
    assert text == (
        "Of 16.00 GiB of memory, 12.00 GiB may be in use. Weights take 4.00 GiB, activations of a full step 1.00 GiB, "
        "everything else 2.00 GiB. The KV cache gets 5120 blocks of 1.0 MiB (5.00 GiB, 81920 tokens), limited by "
        "memory (gpu_memory_utilization)."
    )


@pytest.mark.parametrize("utilization", [0.4, 1])
def test_what_may_be_in_use_adds_up(utilization):
    config = EngineConfig.model_validate({"kv_cache": {"cpu_memory_utilization": utilization}})
    use = host_use(config, HostMemory(total=24 * GIB, free=16 * GIB), weights=5 * GIB, activations=GIB)
    text = plan_memory(use, NEEDS, config.kv_cache).describe()
    usable = 8 + 6 + utilization * 10
    assert text.startswith(
        f"Of 24.00 GiB of memory, {usable:.2f} GiB may be in use: what is taken without the cache, and {utilization} "
        "(cpu_memory_utilization) of the 10.00 GiB left. Weights take 5.00 GiB, activations of a full step 1.00 GiB, "
        "everything else 8.00 GiB. The KV cache gets"
    )


def test_a_sequence_that_does_not_fit_says_what_would():
    use = dataclasses.replace(USE, weights=USE.weights + 4992 * MIB)
    with pytest.raises(OutOfMemoryError) as caught:
        plan_memory(use, NEEDS, KVCacheConfig())
    text = str(caught.value)
    for part in ("weights take 8.88 GiB", "1.00 GiB", "2.00 GiB", "leaves 128.0 MiB", "needs 257.0 MiB"):
        assert part.lower() in text.lower()
    assert "Lower max_model_len to 2032 or less, or raise gpu_memory_utilization." in text
    fitting = dataclasses.replace(NEEDS, max_model_len=2032, blocks_per_sequence=127)
    assert plan_memory(use, fitting, KVCacheConfig()).num_blocks == 128


def test_weights_that_do_not_fit():
    with pytest.raises(OutOfMemoryError, match=r"more than there is.*smaller model"):
        plan_memory(dataclasses.replace(USE, weights=20 * GIB), NEEDS, KVCacheConfig())


@pytest.mark.parametrize(
    ("cache", "text"),
    [
        (KVCacheConfig(num_blocks=10_000), "num_blocks asks for a KV cache of 9.77 GiB, but only 9.00 GiB"),
        (KVCacheConfig(memory_gib=100), "memory_gib asks for a KV cache of 100.00 GiB"),
        (KVCacheConfig(memory_gib=0.001), "memory_gib gives the KV cache 1 blocks of 1.0 MiB; it must give at least 2"),
    ],
)
def test_sizes_that_cannot_be(cache, text):
    with pytest.raises(OutOfMemoryError, match=text):
        plan_memory(USE, NEEDS, cache)


def test_a_small_pool_may_be_set_on_purpose():
    assert plan_memory(USE, NEEDS, KVCacheConfig(num_blocks=2)).num_blocks == 2


@pytest.mark.parametrize(
    ("size", "text"), [(12, "12 bytes"), (2048, "2.0 KiB"), (3 * MIB // 2, "1.5 MiB"), (5 * GIB // 4, "1.25 GiB")]
)
def test_readable(size, text):
    assert readable(size) == text


class TestHostBlocks:
    PLAN = plan_memory(USE, NEEDS, KVCacheConfig())

    @pytest.mark.parametrize(
        ("setting", "free", "blocks"),
        [
            (None, 64 * GIB, 4 * 1024),  # 4 GiB
            (None, 2 * GIB, 512),  # a quarter of what is free
            (None, -GIB, 0),
            (0, 64 * GIB, 0),
            (0.5, GIB, 512),
            (20, 64 * GIB, 20 * 1024),
        ],
    )
    def test_sizes(self, setting, free, blocks):
        assert plan_host_blocks(setting, self.PLAN, free) == blocks

    def test_by_default_no_more_than_the_cache(self):
        small = plan_memory(USE, NEEDS, KVCacheConfig(num_blocks=7))
        assert plan_host_blocks(None, small, 64 * GIB) == 7

    def test_more_than_is_free_is_refused(self):
        with pytest.raises(OutOfMemoryError, match=r"swap_space_gib asks for 9\.00 GiB of host memory, but only 8\.00"):
            plan_host_blocks(9, self.PLAN, 8 * GIB)

    def test_a_model_without_attention_has_nothing_to_swap(self):
        assert plan_host_blocks(1, dataclasses.replace(self.PLAN, block_bytes=0), 8 * GIB) == 0
