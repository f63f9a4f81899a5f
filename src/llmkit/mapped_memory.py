"""Memory that comes from the system directly: zeroed, on huge pages where there are some, committed where written.

With 4 KiB pages a decode step looks up a hundred thousand page addresses, on a virtual machine twice, and a prefill
has as many pages cleared one by one.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

_POPULATE_WRITE = 23  # of madvise, since Linux 5.14
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
    return np.frombuffer(mapped(count * kind.itemsize), kind, count).reshape(sizes)


class MappedMemory:
    """Gives out tensors for weights from large pieces of memory of its own.

    Beside the temporaries of loading, weights would keep the heap from being reused and given back. A piece goes back
    to the system when the last of its tensors is gone.
    """

    def __init__(self) -> None:
        self._piece: weakref.ref[np.ndarray[Any, np.dtype[np.uint8]]] | None = None
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor [shape] of `dtype` (None: float32) to be written.

        Raises OSError or MemoryError if the system has no more memory.
        """
        import torch

        kind = dtype or torch.float32
        nbytes = math.prod(shape) * kind.itemsize
        piece, start = self._piece_with(nbytes)
        self._used = start + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return torch.from_numpy(piece[start : start + nbytes]).view(kind).view(shape)

    def _piece_with(self, nbytes: int) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], int]:
        """A piece with room for that many bytes, and where in it they begin."""
        piece = self._piece() if self._piece is not None else None
        if piece is not None and self._used + nbytes <= len(piece):
            return piece, self._used
        piece = np.frombuffer(mapped(max(nbytes, _PIECE)), np.uint8)
        self._piece = weakref.ref(piece)
        return piece, 0


def commit(address: int, nbytes: int) -> None:
    """Have the system provide memory for [address, address + nbytes) now, as if it was written to; content stays.

    Where the system cannot, memory is provided when it is written to, as ever.
    """
    _advise(address // mmap.PAGESIZE * mmap.PAGESIZE, address + nbytes, _POPULATE_WRITE)


def on_huge_pages(address: int, nbytes: int) -> None:
    """Ask for huge pages for the whole pages in [address, address + nbytes)."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        page = mmap.PAGESIZE
        first, last = (address + page - 1) // page * page, (address + nbytes) // page * page
        _advise(first, last, mmap.MADV_HUGEPAGE)


def _advise(first: int, last: int, advice: int) -> None:
    """first: the address of a page. Nothing happens but on Linux, whose numbers for advice these are."""
    if sys.platform == "linux" and last > first:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)


def mapped(size: int) -> mmap.mmap:
    """So many bytes, zeros, on huge pages where the system has some. Raises OSError if it has no more memory."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # not a POSIX system
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages refuses, and nothing is lost
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
