"""Memory for weights in pieces of its own."""

from __future__ import annotations

import weakref

import torch

from llmkit.mapped_memory import MappedMemory


def test_tensors_lie_apart_in_one_piece() -> None:
    memory = MappedMemory()
    first, second = memory.empty((3, 5)), memory.empty((7,), torch.uint8)
    third = memory.empty((2, 2), torch.bfloat16)
    for value, tensor in enumerate((first, second, third), 1):
        tensor.fill_(value)
    assert (first.dtype, second.dtype, third.dtype) == (torch.float32, torch.uint8, torch.bfloat16)
    assert first.shape == (3, 5)
    assert [float(tensor.float().mean()) for tensor in (first, second, third)] == [1, 2, 3]
    starts = [tensor.data_ptr() for tensor in (first, second, third)]
    assert starts == sorted(starts)
    assert all(start % 64 == 0 for start in starts)
    assert starts[-1] - starts[0] < 4096


def test_a_tensor_larger_than_a_piece() -> None:
    memory = MappedMemory()
    small, large = memory.empty((1,)), memory.empty((65 << 20,), torch.uint8)
    large[-1] = 7
    small[0] = 1
    assert int(large[-1]) == 7


def test_a_piece_is_gone_with_its_last_tensor() -> None:
    """Not with the object that gave it out, which a worker keeps while its engine sleeps."""
    memory = MappedMemory()
    first, second = memory.empty((4,)), memory.empty((4,))
    piece = weakref.ref(memory._piece())  # type: ignore[misc]
    del first
    assert piece() is not None
    del second
    assert piece() is None
    again = memory.empty((4,))
    again.fill_(3)
    assert again.sum() == 12
