"""Compile the kernels of a step side by side before any of them is launched.

A kernel is compiled when it is first launched, and whoever launches it waits. In a rehearsal a step is run in which
kernels are not launched but handed to threads to be compiled, so that a start waits for the slowest of them and not for
all. What such a step computes is worthless: it runs on memory that nobody has written.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar, Token
from functools import partial
from types import TracebackType
from typing import Any

import torch

logger = logging.getLogger("llmkit.execution")

_MOST_THREADS = 16
_ALIGNMENT = 16

_getting_ready = threading.Lock()
_is_ready = False  # what Triton does once

_active: ContextVar[Rehearsal | None] = ContextVar("rehearsal", default=None)


class Rehearsal:
    """While it is entered, `launch` in this thread compiles for `device`; leaving it waits for what is under way."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compiled: dict[Hashable, Future[Any]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._before: Token[Rehearsal | None] | None = None

    def __enter__(self) -> Rehearsal:
        threads = min(_MOST_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(threads, "compile", initializer=partial(_use, _index(self._device)))
        self._before = _active.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._pool is not None
        assert self._before is not None
        _active.reset(self._before)
        self._pool.shutdown(wait=True, cancel_futures=error is not None)
        for future in self._compiled.values():
            if not future.cancelled() and future.exception() is not None:
                # Whoever launches the kernel is told.
                logger.debug("a kernel could not be compiled ahead: %s", future.exception())

    @property
    def num_kernels(self) -> int:
        """Different ones that were handed over."""
        return len(self._compiled)

    def take(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Have it compiled for such arguments, once."""
        free = set(getattr(kernel, "do_not_specialize", None) or ())
        names = getattr(kernel, "arg_names", ())
        known = (
            kernel,
            tuple(_kind_of(value, i < len(names) and names[i] in free) for i, value in enumerate(arguments)),
            tuple(options.items()),
        )
        if known not in self._compiled:
            assert self._pool is not None
            self._compiled[known] = self._pool.submit(partial(_compile, kernel, grid, arguments, options))


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Any:
    """`kernel[grid](*arguments, **options)` of a Triton kernel; None in a rehearsal, which only has it compiled."""
    rehearsal = _active.get()
    if rehearsal is None:
        return kernel[grid](*arguments, **options)
    rehearsal.take(kernel, grid, arguments, options)
    return None


def start_compiler(device: torch.device) -> None:
    """In a thread, have done what Triton does once before it compiles for a GPU: a checksum of itself, for which 400 MB
    are read, and a run of the C compiler. Only if Triton has been imported; nobody need wait for it."""
    if device.type == "cuda" and "triton" in sys.modules and not _is_ready:
        threading.Thread(target=_use, args=(_index(device),), name="compiler", daemon=True).start()


def rehearsing() -> bool:
    """Whether `launch` compiles in this thread and launches nothing. What kernels would have written must then be made
    otherwise where somebody looks something up by it."""
    return _active.get() is not None


def _compile(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    _build_launcher(kernel.warmup(*arguments, grid=grid, **options))


def _build_launcher(compiled: Any) -> None:
    """Have the C function built that launches kernels of such a signature: a run of the C compiler, which Triton leaves
    to the first launch, where others would wait for it. The launch finds it in Triton's cache."""
    if not hasattr(compiled, "src"):  # interpreted
        return
    from triton.runtime import driver

    driver.active.launcher_cls(compiled.src, compiled.metadata)


def _index(device: torch.device) -> int | None:
    """Of a GPU, which it is; Triton compiles for the thread's own."""
    if device.type != "cuda":
        return None
    return torch.cuda.current_device() if device.index is None else device.index


def _use(index: int | None) -> None:
    if index is not None:
        torch.cuda.set_device(index)
        _get_ready()


def _get_ready() -> None:
    """Once in the process, whoever comes first; others wait. What fails here, compiling does again, and tells."""
    global _is_ready
    with _getting_ready:
        if _is_ready:
            return
        try:
            from triton.compiler.compiler import make_backend
            from triton.runtime import driver
            from triton.runtime.cache import triton_key

            triton_key()
            make_backend(driver.active.get_current_target()).hash()
        except Exception as error:
            logger.debug("the compiler of kernels is not ready: %s", error)
        _is_ready = True


def _kind_of(value: Any, free: bool) -> Hashable:
    """What a kernel is compiled for of an argument."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % _ALIGNMENT == 0
    if free or isinstance(value, float):
        return type(value).__name__
    if hasattr(value, "block_shape"):  # a descriptor of copies
        return _kind_of(value.base, free), tuple(value.block_shape)
    if isinstance(value, int) and not isinstance(value, bool):
        return value == 1, value % _ALIGNMENT == 0, value.bit_length() > 31
    hashable: Hashable = value
    return hashable
