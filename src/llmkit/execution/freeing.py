"""Gives memory back to the system."""

from __future__ import annotations

import ctypes
import gc
import sys

import torch


def give_back_memory(device: torch.device) -> None:
    """Return what is no longer referred to. Takes some milliseconds: for loading and closing, not for steps.

    Modules and their parents refer to each other, so they need the collector. glibc keeps freed weights for itself
    once it has seen a few allocations of their size; hundreds of MiB then stay with the process unless trimmed.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
