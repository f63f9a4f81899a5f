"""Zeroed memory that takes room only where it is written."""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import Any

import numpy as np


def lazy_zeros(shape: int | tuple[int, ...], dtype: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """As `numpy.zeros`, but every page is committed when it is first written.

    numpy asks calloc, which clears memory by hand, and so commits it, when it finds room in the heap for it.
    """
    kind = np.dtype(dtype)
    sizes = (shape,) if isinstance(shape, int) else shape
    count = math.prod(sizes)
    if not count:
        return np.zeros(sizes, kind)
    memory = mmap.mmap(-1, count * kind.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # As numpy does for large arrays; a kernel without huge pages refuses, and nothing is lost.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, kind, count).reshape(sizes)
