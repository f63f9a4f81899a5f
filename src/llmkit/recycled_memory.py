"""Memory for what lives only a moment while a model loads: used again as soon as nobody holds it.

Each tensor of a checkpoint is read, converted and packed in buffers of its own. Fresh from the system, each page of
them would have to be cleared first: for a small model that takes longer than all the rest of loading.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

from llmkit.mapped_memory import mapped

if TYPE_CHECKING:
    import mmap

    import torch

    _Array = np.ndarray[Any, np.dtype[Any]]

# Sizes in bytes. Smaller buffers come from the heap, which uses its memory again by itself; larger ones are few, and
# go back to the system at once: waiting for another of their size, they would add to the peak of memory.
_SMALLEST, _LARGEST = 1 << 20, 32 << 20


class RecycledMemory:
    """Gives out arrays on huge pages, and the memory of those that nobody holds any more to the next ones.

    Only to arrays of just that size, so that whoever keeps one (or a tensor on it) keeps no more than it needs.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, list[tuple[weakref.ref[_Array], mmap.mmap]]] = {}

    def array(self, nbytes: int) -> _Array:
        """An array uint8 [nbytes] of undefined content, nbytes > 0. Views of it and tensors on it count as the array.

        Raises OSError or MemoryError if the system has no more memory.
        """
        if nbytes > _LARGEST:
            return np.frombuffer(mapped(nbytes), np.uint8)
        pieces = self._pieces.setdefault(nbytes, [])
        free = next((i for i, (lent, _) in enumerate(pieces) if lent() is None), None)
        memory = mapped(nbytes) if free is None else pieces.pop(free)[1]
        # An array that numpy makes of a buffer is what all views of it refer to.
        array: _Array = np.frombuffer(memory, np.uint8)
        pieces.append((weakref.ref(array), memory))
        return array


_in_use: ContextVar[RecycledMemory | None] = ContextVar("recycled_memory", default=None)


@contextmanager
def recycling() -> Iterator[None]:
    """While this lasts, `passing_array` and `passing_tensor` of this thread use the memory of earlier ones again."""
    token = _in_use.set(RecycledMemory())
    try:
        yield
    finally:
        _in_use.reset(token)


def passing_array(shape: tuple[int, ...], dtype: Any) -> _Array:
    """As `numpy.empty`, for an array that is likely to be dropped soon; it may be kept all the same."""
    memory, kind = _in_use.get(), np.dtype(dtype)
    nbytes = math.prod(shape) * kind.itemsize
    if memory is None or nbytes < _SMALLEST:
        return np.empty(shape, kind)
    array: _Array = memory.array(nbytes).view(kind)
    return array.reshape(shape)


def passing_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """As `torch.empty` on the host, for a tensor that is likely to be dropped soon; it may be kept all the same."""
    import torch

    memory, nbytes = _in_use.get(), math.prod(shape) * dtype.itemsize
    if memory is None or nbytes < _SMALLEST:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_numpy(memory.array(nbytes)).view(dtype).view(shape)
