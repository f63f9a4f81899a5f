"""Compiling kernels and running them on torch's own OpenMP threads.

Kernels are numba C callbacks `void kernel(int64 *args)`. `launch` hands the function pointer to the `GOMP_parallel` of
the libgomp that torch has loaded, so that there is one pool, one number of threads (`torch.get_num_threads()`) and no
two sets of spinning threads on the same cores. Inside, threads take pieces of work from an atomic counter, `args[0]`;
every output is to be made by one thread in a fixed order, so that results do not depend on the schedule.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pickle
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from llmkit.cache_folder import cache_folder
from llmkit.jit import panels, tiles, vector

if TYPE_CHECKING:
    from llmkit.jit.recording import Recording

MAX_VALUES = 512  # of `launch`

_lock = threading.RLock()
_parallel: Callable[..., None] | None = None
_barrier = 0
_loaded = False
_sources: set[str] = set()


def load() -> None:
    """Import numba and bind the operations of `vector`, `tiles` and `panels`. Safe to call again, from any thread."""
    global _loaded
    if _loaded:
        return
    with _lock:
        if not _loaded:
            _keep_integer_dots()
            vector.bind()
            tiles.bind()
            panels.bind()
            _bind_threads()
            _loaded = True


def _keep_integer_dots() -> None:
    """Have LLVM keep `vpdpwssd` where the processor has it. For Intel's processors it makes a multiplication and an
    addition of each, to have the sum sooner; products with codes have a dozen sums under way and take 1.6 times as long
    with twice the instructions. Has no effect if this process has compiled with numba before."""
    import numba
    from numba.core.codegen import get_host_cpu_features

    if numba.config.CPU_FEATURES is not None:  # $NUMBA_CPU_FEATURES
        return
    features = get_host_cpu_features()
    if "+avx512vnni" in features.split(","):
        numba.config.CPU_FEATURES = f"{features},+fast-dpwssd"


def loaded() -> bool:
    """Whether `load` was called, that is, whether anything here uses compiled kernels."""
    return _loaded


class Kernel:
    """A compiled kernel. address: of its code. call: runs it on the calling thread, given the address of its args."""

    def __init__(self, code: Any) -> None:
        self._code = code  # keeps the machine code alive
        self.address: int = code.address
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)


def compile_kernel(function: Callable[..., None], helpers: tuple[ModuleType, ...] = ()) -> Kernel:
    """Compile (or load from the cache) `function(args: int64*)`.

    helpers: other modules than `llmkit.jit`'s and the function's own whose functions it calls. The cache is
    $NUMBA_CACHE_DIR, else `kernels` in llmkit's cache folder; one that cannot be used is done without.
    """
    load()
    import numba

    _sources.update([function.__code__.co_filename, *(str(module.__file__) for module in helpers)])
    signature = numba.types.void(numba.types.CPointer(numba.types.int64))
    options = {"error_model": "numpy", "fastmath": False}
    with _lock:
        folder = cache_path(helpers)
        if folder is not None:
            before = numba.config.CACHE_DIR
            numba.config.CACHE_DIR = str(folder)
            try:
                return Kernel(numba.cfunc(signature, cache=True, **options)(function))
            except (OSError, EOFError, pickle.UnpicklingError):
                pass  # a full disk or a damaged file: the kernel is compiled in memory
            finally:
                numba.config.CACHE_DIR = before
        return Kernel(numba.cfunc(signature, **options)(function))


def source_files() -> frozenset[str]:
    """The files of the kernels that this process has compiled or loaded."""
    return frozenset(_sources)


def cache_path(helpers: tuple[ModuleType, ...] = ()) -> Path | None:
    """The folder for the code of kernels with such helpers, or None if nothing can be written there.

    Operations and helpers are inlined in a kernel, but numba only watches the file of the kernel itself: a folder
    named by the content of the files that define them keeps stale code out.
    """
    modules = (vector, tiles, panels, sys.modules[__name__], *helpers)
    digest = hashlib.sha256()
    for module in modules:
        digest.update(Path(module.__file__ or "").read_bytes())
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    folder = (Path(chosen) if chosen else cache_folder() / "kernels") / digest.hexdigest()[:12]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return None


def _bind_threads() -> None:
    """Find GOMP_parallel in the OpenMP library that torch uses; without one kernels run on the calling thread."""
    global _parallel, _barrier
    folder = Path(torch.__file__).parent / "lib"
    for path in sorted(folder.glob("libgomp*.so*")):
        try:
            library = ctypes.CDLL(str(path))
            symbol, barrier = library.GOMP_parallel, library.GOMP_barrier
        except (OSError, AttributeError):
            continue
        symbol.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        symbol.restype = None
        _parallel, _barrier = symbol, ctypes.cast(barrier, ctypes.c_void_p).value or 0
        return


def barrier_address() -> int:
    """Of a function in which the threads of a `launch` wait for each other; 0 where launches have one thread."""
    return _barrier


_buffers = threading.local()
_arguments = threading.local()  # of launch; a fresh ctypes array costs more than a small kernel
_packers = [struct.Struct(f"{count + 1}q") for count in range(MAX_VALUES + 1)]


def scratch_address(size: int) -> int:
    """The address of `size` bytes that belong to the calling Python thread until its next call."""
    recording = getattr(_arguments, "recording", None)
    if recording is not None:
        return int(recording.arena.bytes(size).data_ptr())
    buffer = getattr(_buffers, "buffer", None)
    if buffer is None or buffer.numel() < size:
        buffer = _buffers.buffer = torch.empty(size, dtype=torch.uint8)
    return int(buffer.data_ptr())


def empty(shape: tuple[int, ...]) -> torch.Tensor:
    """An uninitialised float32 tensor for a kernel's result; where launches are recorded, in the recording's memory."""
    recording = getattr(_arguments, "recording", None)
    return torch.empty(shape) if recording is None else recording.arena.floats(shape)


@contextmanager
def recording_to(recording: Recording) -> Iterator[None]:
    """While this lasts, launches of the calling thread are also added to `recording`."""
    _arguments.recording = recording
    try:
        yield
    finally:
        _arguments.recording = None


def launch(kernel: Kernel, threads: int, *values: int) -> None:
    """Run `kernel` on `threads` threads with args = [0, *values] (at most MAX_VALUES) and wait for them."""
    try:
        buffer, address, recording = _arguments.buffer, _arguments.address, _arguments.recording
    except AttributeError:
        buffer = _arguments.buffer = ctypes.create_string_buffer(8 * MAX_VALUES + 8)
        address = _arguments.address = ctypes.addressof(buffer)
        recording = _arguments.recording = getattr(_arguments, "recording", None)
    if recording is not None:
        recording.add(kernel, threads, values)
    _packers[len(values)].pack_into(buffer, 0, 0, *values)
    if threads > 1 and _parallel is not None:
        _parallel(kernel.address, address, threads, 0)
    else:
        kernel.call(address)


@lru_cache(maxsize=256)
def float_bits(value: float) -> int:
    """The bits of a float64 as an integer, as kernels take floats (`as_float`)."""
    return int(struct.unpack("q", struct.pack("d", value))[0])


def inner(function: Callable[..., Any]) -> Any:
    """Compile a function of int64 that kernels call."""
    load()
    import numba

    return numba.njit(error_model="numpy", inline="never")(function)
