"""When freed memory stays with the process, and when the system gets it back."""

from __future__ import annotations

import ctypes
import gc
import sys

import torch

from llmkit.mapped_memory import on_huge_pages

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt
_KEPT = 1 << 30  # bytes
_PASSING = 1 << 20  # bytes
_HEAP_TOP = 32 << 20  # bytes


def return_freed_memory() -> None:
    """Let glibc return large blocks at once, until `keep_freed_memory`: for loading.

    By default it moves blocks of up to 32 MiB into its heap once it has seen some freed. Aligned blocks of many sizes
    then leave gaps that the next ones do not fit into, and each layer loaded adds its weights in full precision to what
    stays resident. Smaller blocks stay in the heap: its top would otherwise go back with each of them, only to come
    again with the next. Concerns the whole process.
    """
    _tune(_MMAP_THRESHOLD, _PASSING)
    _tune(_TRIM_THRESHOLD, _HEAP_TOP)


def keep_freed_memory() -> None:
    """Let glibc keep what steps free for the next ones, until `give_back_memory`.

    By default large blocks come from the system and go back to it: a prefill then touches tens of thousands of new
    pages, which the system has to clear, once for every layer. Concerns the whole process.
    """
    _tune(_MMAP_THRESHOLD, _KEPT)
    _tune(_TRIM_THRESHOLD, _KEPT)


def grow_heap(nbytes: int) -> tuple[int, int] | None:
    """Put `nbytes` at the end of glibc's heap, on huge pages: after `keep_freed_memory`, where the blocks of the next
    steps come from. Returns (address, nbytes), None if there is no such heap. Memory is committed as it is written.
    """
    if sys.platform != "linux" or not 0 < nbytes <= _KEPT // 2:
        return None
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return None
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    block = library.malloc(nbytes)
    if not block:
        return None
    on_huge_pages(block, nbytes)
    library.free(block)
    return int(block), nbytes


def _tune(parameter: int, value: int) -> None:
    change = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if change is not None:
        change(parameter, value)


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
