"""Weights are read while others are packed."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from llmkit.errors import ModelError
from llmkit.execution import read_ahead as module
from llmkit.execution.read_ahead import read_ahead
from llmkit.recycled_memory import passing_tensor, recycling

Named = tuple[str, torch.Tensor]


class Checkpoint:
    """Three tensors; `read[i]` is set when the i-th has been asked for, `closed` at the end."""

    def __init__(self) -> None:
        self.read = [threading.Event() for _ in range(3)]
        self.closed = threading.Event()

    def tensors(self) -> Iterator[Named]:
        try:
            for i, event in enumerate(self.read):
                event.set()
                yield f"w{i}", torch.full((4,), float(i))
        finally:
            self.closed.set()


def test_all_come_in_order() -> None:
    found = list(read_ahead(Checkpoint().tensors()))
    assert [name for name, _ in found] == ["w0", "w1", "w2"]
    assert [float(tensor[0]) for _, tensor in found] == [0, 1, 2]
    assert list(read_ahead([])) == []


def test_the_next_is_read_while_one_is_in_use() -> None:
    checkpoint = Checkpoint()
    tensors = read_ahead(checkpoint.tensors())
    next(tensors)
    assert checkpoint.read[1].wait(30)
    assert not checkpoint.read[2].is_set()
    tensors.close()  # type: ignore[attr-defined]


def test_nothing_is_read_beside_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE", 15)
    checkpoint = Checkpoint()
    tensors = read_ahead(checkpoint.tensors())
    for i in range(2):
        assert next(tensors)[0] == f"w{i}"
        assert not checkpoint.read[i + 1].wait(0.05)
    assert [name for name, _ in tensors] == ["w2"]


def test_what_reading_raises_comes_in_its_place() -> None:
    def damaged() -> Iterator[Named]:
        yield "w0", torch.zeros(1)
        raise ModelError("the file is cut short")

    tensors = read_ahead(damaged())
    assert next(tensors)[0] == "w0"
    with pytest.raises(ModelError, match="cut short"):
        next(tensors)


def test_reading_ends_with_whoever_wanted_the_tensors() -> None:
    checkpoint = Checkpoint()
    tensors = read_ahead(checkpoint.tensors())
    next(tensors)
    tensors.close()  # type: ignore[attr-defined]
    del tensors
    assert checkpoint.closed.wait(30)
    assert not any(thread.name.startswith("llmkit-weights") for thread in threading.enumerate())


def test_tensors_are_read_into_memory_of_earlier_ones() -> None:
    def tensors() -> Iterator[Named]:
        for i in range(12):
            yield f"w{i}", passing_tensor((512, 1024), torch.float32)

    with recycling():
        places = {tensor.data_ptr() for _, tensor in read_ahead(tensors())}
    assert len(places) <= 4
