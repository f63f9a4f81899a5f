"""Memory that comes from the system directly: zeroed, on huge pages where there are some, committed where written.

With 4 KiB pages a decode step looks up a hundred thousand page addresses, on a virtual machine twice, and a prefill
has as many pages cleared one by one.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

_PIECE = 64 << 20  # bytes
_ALIGNMENT = 64  # bytes


def lazy_zeros(shape: int | tuple[int, ...], dtype: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """As `numpy.zeros`, but every page is committed when it is first written.

    numpy asks calloc, which clears memory by hand, and so commits it, when it finds room in the heap for it.
    """
    kind = np.dtype(dtype)
    sizes = (shape,) if isinstance(shape, int) else shape
    count = math.prod(sizes)
    if not count:
        return np.zeros(sizes, kind)
    return np.frombuffer(_mapped(count * kind.itemsize), kind, count).reshape(sizes)


class MappedMemory:
    """Gives out float32 tensors from large pieces of memory of its own.

    A piece goes back to the system when the last of its tensors is gone.
    """

    def __init__(self) -> None:
        self._piece = np.empty(0, dtype=np.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor [shape] to be written. Raises OSError or MemoryError if the system has no more memory."""
        import torch

        count = math.prod(shape)
        size = -(-4 * count // _ALIGNMENT) * _ALIGNMENT
        if self._used + size > len(self._piece):
            self._piece = lazy_zeros(max(size, _PIECE), np.uint8)
            self._used = 0
        values = self._piece[self._used : self._used + 4 * count].view(np.float32)
        self._used += size
        return torch.from_numpy(values).view(shape)


def _mapped(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):  # not a POSIX system
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages refuses, and nothing is lost
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
