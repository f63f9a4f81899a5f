"""Brings a step's small arrays to the device in one copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

HostArray = np.ndarray[Any, Any]
ArraySpec = tuple[type[np.generic], tuple[int, ...]]

_ALIGNMENT = 64
_TORCH_DTYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class StagingBuffer:
    """Arrays laid out one after another in host memory, mirrored on the device.

    `layout` hands out host arrays to be filled, `send` makes them available as device tensors. On the CPU the
    tensors are views of the arrays themselves; elsewhere the host side is pinned and one copy moves everything.
    What `layout` handed out is overwritten by the next `layout`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_host = device.type == "cpu"
        self._host = torch.empty(0, dtype=torch.uint8)
        self._mirror = self._host
        self._copied: torch.cuda.Event | None = None
        self._places: dict[str, tuple[int, int, np.dtype[Any], tuple[int, ...]]] = {}
        self._used = 0

    def layout(self, specs: Mapping[str, ArraySpec]) -> dict[str, HostArray]:
        """name → (numpy scalar type, shape) → uninitialised host arrays."""
        self._places, offset = {}, 0
        for name, (scalar, shape) in specs.items():
            dtype = np.dtype(scalar)
            size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            self._places[name] = (offset, size, dtype, shape)
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._used = offset
        self._reserve(offset)
        memory = self._host.numpy()
        return {
            name: memory[start : start + size].view(dtype).reshape(shape)
            for name, (start, size, dtype, shape) in self._places.items()
        }

    def send(self) -> dict[str, torch.Tensor]:
        """Device tensors with the contents of the arrays of the last `layout`."""
        self.copy()
        return self.views()

    def copy(self) -> None:
        """Bring the arrays of the last `layout` to the device."""
        if not self._is_host:
            self._mirror[: self._used].copy_(self._host[: self._used], non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def views(self) -> dict[str, torch.Tensor]:
        """The device tensors of the last `layout`. Their addresses stay while no larger layout is asked for."""
        return {
            name: self._mirror[start : start + size].view(_TORCH_DTYPES[dtype]).view(shape)
            for name, (start, size, dtype, shape) in self._places.items()
        }

    def _reserve(self, size: int) -> None:
        if self._copied is not None:
            # The last copy may still be reading the host side; in practice it is long done.
            self._copied.synchronize()
            self._copied = None
        if size > len(self._host):
            capacity = 1 << max(16, (size - 1).bit_length())
            self._host = torch.empty(capacity, dtype=torch.uint8, pin_memory=not self._is_host)
            self._mirror = (
                self._host if self._is_host else torch.empty(capacity, dtype=torch.uint8, device=self._device)
            )
