"""The memory of the host tier: slots of equal size in one piece of host memory."""

from __future__ import annotations

import contextlib
import logging
import mmap
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import torch

from llmkit.errors import OutOfMemoryError
from llmkit_connectors.offload.cache_blocks import Bytes

logger = logging.getLogger("llmkit.connectors.offload")


class HostMemory:
    """`num_slots` slots of `slot_bytes` bytes.

    Memory is committed when it is first written. For a cache on a CUDA device it is pinned, and so committed, at
    once, so that copies run beside the step; if the system does not allow that, they run all the same, slower.
    """

    def __init__(self, num_slots: int, slot_bytes: int, *, pinned: bool) -> None:
        """Raises OutOfMemoryError."""
        size = num_slots * slot_bytes
        try:
            if size > psutil.virtual_memory().total:
                raise OSError("this machine does not have so much memory")
            self._memory = mmap.mmap(-1, max(size, 1))
        except (OSError, OverflowError, ValueError) as error:
            raise OutOfMemoryError(
                f"The host tier of the offload connector cannot have its {size} bytes: {error}.",
                hint="Lower the option host_gib.",
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages; nothing is lost
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._slots = np.frombuffer(self._memory, np.uint8, size).reshape(num_slots, slot_bytes)
        self._pinned = pinned and _pin(self._slots)

    def slot(self, number: int, size: int) -> Bytes:
        """The first `size` bytes of a slot."""
        return self._slots[number, :size]

    def close(self) -> None:
        """Unpin the memory; it is freed when nobody has a slot any more. May be called twice."""
        if self._pinned:
            self._pinned = False
            _cudart().cudaHostUnregister(self._slots.ctypes.data)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _pin(memory: np.ndarray[Any, np.dtype[np.uint8]]) -> bool:
    status = _cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
    if int(status):
        logger.warning(
            "%d bytes of host memory cannot be pinned (CUDA error %d); copies are slower", memory.nbytes, status
        )
        return False
    return True
