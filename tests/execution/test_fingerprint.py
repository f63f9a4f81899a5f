"""The fingerprint of a KV block: equal for what may be mixed, and for nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from llmkit.config import EngineConfig
from llmkit.execution.fingerprint import WeightsChecksum, kv_fingerprint
from llmkit.hookspecs.attention import AttentionBackend
from llmkit.kv_cache.layout import KVGroup, KVSpec


def checksum(**tensors):
    made = WeightsChecksum()
    assert [name for name, _ in made.counted(tensors.items())] == list(tensors)
    return made.hexdigest()


def test_the_order_in_which_tensors_come_does_not_matter():
    one, two = torch.arange(5.0), torch.ones(2, 3)
    assert checksum(a=one, b=two) == checksum(b=two.clone(), a=one.clone())


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.tensor([1.0, 2.0, 4.0])},
        {"a": torch.tensor([2.0, 1.0, 3.0])},
        {"a": torch.tensor([[1.0, 2.0, 3.0]])},
        {"a": torch.tensor([1.0, 2.0, 3.0]).view(torch.int32)},
        {"b": torch.tensor([1.0, 2.0, 3.0])},
        {"a": torch.tensor([1.0, 2.0, 3.0]), "b": torch.zeros(0)},
    ],
)
def test_every_change_shows(other):
    assert checksum(**other) != checksum(a=torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("place", [0, 1, 2**20 - 1, 2**20, 2**21 + 5])
def test_one_element_anywhere_shows(dtype, place):
    """Also beyond the words that are summed at a time, and where bytes are no whole word."""
    tensor = torch.zeros(2**22 + 7, dtype=dtype)
    before = checksum(a=tensor)
    tensor[place] = 1
    moved = torch.roll(tensor, 2)
    assert len({before, checksum(a=tensor), checksum(a=moved)}) == 3


class Standard(AttentionBackend):
    def support(self, query):
        raise NotImplementedError

    def plan(self, batch):
        raise NotImplementedError

    def forward(self, *arguments):
        raise NotImplementedError


class AlsoStandard(Standard):
    pass


class OfItsOwn(Standard):
    def __repr__(self):
        return "a backend with a layout of its own"

    def kv_shape(self, num_pages, page_size, num_kv_heads, head_size):
        return (num_pages, 2, num_kv_heads, page_size, head_size)


def fingerprint(**changes):
    built = {"backend": Standard(), "page_size": 16, "block_size": 16, "quantization": "none", "dtype": torch.float32}
    given = {"model": {"hidden_size": 8}, "weights": "w", "world_size": 1, "length": 64} | built | changes
    config = EngineConfig()
    config = config.model_copy(update={"model": config.model.model_copy(update={"max_model_len": given["length"]})})
    groups = (KVGroup(KVSpec(2, 8, given["dtype"]), (0, 1)),)
    return kv_fingerprint(
        SimpleNamespace(groups=groups, **{name: given[name] for name in built if name != "dtype"}),
        SimpleNamespace(config=config, source=SimpleNamespace(config=given["model"]), world_size=given["world_size"]),
        given["weights"],
    )


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"hidden_size": 9}},
        {"weights": "x"},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float8_e4m3fn},
        {"block_size": 32},
        {"page_size": 8},
        {"world_size": 2},
        {"quantization": "int8"},
        {"backend": OfItsOwn()},
    ],
    ids=str,
)
def test_what_changes_bytes_changes_the_fingerprint(change):
    assert fingerprint(**change) != fingerprint()


def test_what_changes_no_bytes_does_not():
    assert fingerprint(backend=AlsoStandard()) == fingerprint(length=128) == fingerprint()


def test_a_length_that_changes_frequencies_counts():
    longrope = {"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [2.0]}}
    assert fingerprint(model=longrope) != fingerprint(model=longrope, length=128)
