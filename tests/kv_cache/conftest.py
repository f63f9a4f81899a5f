"""Small sequences and layouts for the tests of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from llmkit.kv_cache.hashing import ExtraKey
from llmkit.kv_cache.layout import KVCacheLayout, KVGroup, KVSpec
from llmkit.kv_cache.manager import KVCacheManager


@dataclass
class FakeSequence:
    sequence_id: str
    token_ids: list[int] = field(default_factory=list)
    cache_salt: str | None = None
    extra_keys: tuple[ExtraKey, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class Harness:
    """A manager, and what a scheduler would do with it."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager

    def run(self, name: str, token_ids: list[int], **keys: object) -> FakeSequence:
        """Admit a sequence with whatever is cached, compute all of it, and leave it running."""
        seq = FakeSequence(name, token_ids, **keys)
        assert self.manager.allocate(seq, seq.num_tokens, self.manager.lookup(seq)) is not None
        self.manager.commit(seq, seq.num_tokens)
        self.manager.check_integrity()
        return seq

    def finish(self, name: str, token_ids: list[int], **keys: object) -> None:
        """The same, to its end."""
        self.manager.free(self.run(name, token_ids, **keys))
        self.manager.check_integrity()

    def hit(self, token_ids: list[int], **keys: object) -> int:
        return self.manager.lookup(FakeSequence("probe", token_ids, **keys)).num_tokens


@pytest.fixture
def sequence():
    return FakeSequence


@pytest.fixture
def make_layout():
    def make(num_blocks=9, block_size=4, windows=(None,), prefix_caching=True, num_host_blocks=0) -> KVCacheLayout:
        groups = tuple(KVGroup(KVSpec(1, 8, torch.float32, window), (layer,)) for layer, window in enumerate(windows))
        return KVCacheLayout(groups, num_blocks, block_size, block_size, prefix_caching, num_host_blocks)

    return make


@pytest.fixture
def make_harness(make_layout):
    def make(max_model_len=256, on_event=None, **layout: object) -> Harness:
        return Harness(KVCacheManager(make_layout(**layout), max_model_len=max_model_len, on_event=on_event))

    return make
