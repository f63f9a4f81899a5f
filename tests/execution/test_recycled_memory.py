"""Memory that is used again while a model loads."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from llmkit.recycled_memory import RecycledMemory, passing_array, passing_tensor, recycling
from llmkit_weights.safetensors_file import read_header, read_tensors

MIB = 1 << 20


def address(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> int:
    return int(array.__array_interface__["data"][0])


def test_what_nobody_holds_is_given_out_again() -> None:
    memory = RecycledMemory()
    array = memory.array(2 * MIB)
    first = address(array)
    del array
    assert address(memory.array(2 * MIB)) == first


def test_what_is_held_stays_as_it_is() -> None:
    """Also if only a view of it is held, or a tensor on it."""
    memory = RecycledMemory()
    whole, part = memory.array(2 * MIB), memory.array(2 * MIB)[MIB:].view(np.float32)
    tensor = torch.from_numpy(memory.array(2 * MIB)).view(torch.bfloat16)[:7]
    whole[:], part[:], tensor[:] = 1, 2, 3
    for _ in range(4):
        memory.array(2 * MIB)[:] = 9
    assert (whole == 1).all()
    assert (part == 2).all()
    assert (tensor == 3).all()


def test_memory_serves_arrays_of_one_size_only() -> None:
    """Whoever keeps a small array must not keep the memory of a large one."""
    memory = RecycledMemory()
    array = memory.array(4 * MIB)
    first = address(array)
    del array
    small = memory.array(2 * MIB)
    assert small.nbytes == 2 * MIB
    assert small.base.nbytes == 2 * MIB  # type: ignore[union-attr]
    assert not first <= address(small) < first + 4 * MIB


def test_large_memory_goes_back_at_once() -> None:
    memory = RecycledMemory()
    memory.array(33 * MIB)[:] = 1
    assert not memory._pieces


def test_passing_arrays_and_tensors_share_memory_while_recycling() -> None:
    with recycling():
        first = address(passing_array((MIB,), np.uint8).view(np.uint8))
        tensor = passing_tensor((512, 512), torch.float32)
        assert tensor.data_ptr() == first
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        del tensor
        assert passing_tensor((512, 1024), torch.bfloat16).data_ptr() == first
        assert passing_tensor((3,), torch.int64).shape == (3,)
        assert passing_tensor((), torch.float32).shape == ()
        assert passing_array((0, 4), np.float16).shape == (0, 4)


def test_only_the_thread_that_recycles_does() -> None:
    places: list[int] = []

    def other() -> None:
        kept = [passing_tensor((512, 512), torch.float32) for _ in range(2)]
        places.extend(tensor.data_ptr() for tensor in kept)

    with recycling():
        mine = passing_tensor((512, 512), torch.float32).data_ptr()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert passing_tensor((512, 512), torch.float32).data_ptr() == mine
    assert len(set(places)) == 2


def test_a_checkpoint_is_read_through_the_same_memory(tmp_path: Path) -> None:
    """Before, each of its tensors took memory that the system had to clear first."""
    file = tmp_path / "model.safetensors"
    save_file({f"w{i:02}": torch.full((512, 1024), float(i)) for i in range(12)}, file)
    entries = list(read_header(file).values())
    places, kept = [], []
    with recycling():
        for name, tensor in read_tensors(file, entries):
            places.append(tensor.data_ptr())
            if name == "w03":
                kept.append(tensor)
            del tensor
    assert len(set(places)) == 2
    assert (kept[0] == 3).all()
