"""What the choice of block sizes depends on of a GPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    """processors: multiprocessors. shared_memory: bytes that a program can have."""

    processors: int
    shared_memory: int


@functools.cache
def device_of(device: torch.device) -> Device:
    """Of the GPU; on the CPU, where kernels are interpreted, one of a size that splits something in small tests."""
    if device.type != "cuda":
        return Device(processors=8, shared_memory=2**17)
    properties = torch.cuda.get_device_properties(device)
    return Device(properties.multi_processor_count, properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]
