"""Recording the kernels of a step, to run them again without the Python between them.

A decode step on a small model launches hundreds of kernels of some microseconds. The interpreter that prepares them
finds its own code and data pushed out of the caches by the weights, and takes as long as a third of the step. A
recording holds the arguments of all launches; `replay` runs them in one parallel region, with a barrier where one may
need what others have made.

What is replayed reads and writes the same addresses: inputs must be brought to the tensors that were read while
recording, and intermediate results live in an `Arena` of their own (`runtime.empty`). An operation of torch that
computes something cannot be recorded, and is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmkit.jit import runtime
from llmkit.jit import vector as ops
from llmkit.mapped_memory import lazy_zeros

_ALIGNMENT = 64
_FIELDS = 4  # of an entry of a program: kernel, its arguments, threads, whether a barrier follows
_replay: Any = None
call_kernel: Any = None
call_barrier: Any = None


class CannotRecordError(Exception):
    """What was to be recorded does something that a replay would leave out."""


class Arena:
    """Memory for the intermediate results of recordings, of which only one runs at a time: all share it.

    size: bytes at most; they are committed as they are used.
    """

    def __init__(self, size: int) -> None:
        self._memory = torch.from_numpy(lazy_zeros(size, np.uint8))
        self._used = 0

    def reset(self) -> None:
        """The next tensor begins at the start again."""
        self._used = 0

    def bytes(self, size: int) -> torch.Tensor:
        """`size` bytes. Raises CannotRecordError if they are not left."""
        start = self._used
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        if self._used > len(self._memory):
            raise CannotRecordError(f"intermediate results take more than {len(self._memory)} bytes")
        return self._memory[start : start + size]

    def floats(self, shape: tuple[int, ...]) -> torch.Tensor:
        """An uninitialised float32 tensor."""
        return self.bytes(4 * math.prod(shape)).view(torch.float32).view(shape)


class Recording:
    """The launches of one call of a function."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._launches: list[tuple[int, int, tuple[int, ...]]] = []
        self._pristine = np.empty(0, dtype=np.int64)
        self._live = self._pristine
        self._program = self._pristine
        self._threads = 1

    def add(self, kernel: runtime.Kernel, threads: int, values: tuple[int, ...]) -> None:
        """A launch."""
        self._launches.append((kernel.address, threads, values))

    def finish(self) -> None:
        """No launches follow."""
        sizes = [1 + len(values) for _, _, values in self._launches]
        starts = np.concatenate(([0], np.cumsum([-(-size // 8) * 8 for size in sizes])))
        self._pristine = np.zeros(int(starts[-1]), dtype=np.int64)
        self._live = np.zeros_like(self._pristine)
        program = np.zeros((len(sizes), _FIELDS), dtype=np.int64)
        for i, (address, threads, values) in enumerate(self._launches):
            self._pristine[starts[i] + 1 : starts[i] + sizes[i]] = values
            alone = threads == 1 and (i + 1 == len(sizes) or self._launches[i + 1][1] == 1)
            program[i] = address, self._live.ctypes.data + 8 * int(starts[i]), threads, not alone
        self._program = program.reshape(-1)
        self._threads = max((threads for _, threads, _ in self._launches), default=1)
        self._launches = []

    def replay(self) -> None:
        """Run the recorded kernels again."""
        np.copyto(self._live, self._pristine)
        runtime.launch(
            _replay, self._threads, self._program.ctypes.data, len(self._program) // _FIELDS, runtime.barrier_address()
        )


def record(arena: Arena, function: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Recording]:
    """Run `function`; its result, and a recording that computes it again, into the same tensor.

    Raises CannotRecordError, with nothing recorded, for a function that computes with more than kernels.
    """
    load()
    arena.reset()
    recording = Recording(arena)
    with _OnlyViews(), runtime.recording_to(recording):  # type: ignore[no-untyped-call]
        result = function()
    recording.finish()
    return result, recording


class _OnlyViews(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations of torch that do more than look at a tensor in another way."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nobody compiles what happens in here. Without this torch wraps `__torch_dispatch__` in a call that imports
        its compiler: hundreds of modules, seconds, in the middle of the first answer."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            raise CannotRecordError(f"torch's {func} is not a kernel")
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, (list, tuple)) else (result,)
        storages = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        views = all(isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() in storages for x in outputs)
        if not views:
            raise CannotRecordError(f"torch's {func} is not a kernel")
        return result


def _replay_kernel(args: Any) -> None:
    """args: tickets, the program, its entries, the address of the barrier (0: there is one thread)."""
    me = ops.take(args, 0)
    program, count, barrier = args[1], args[2], args[3]
    for i in range(count):
        entry = program + 8 * _FIELDS * i
        if me < ops.iload64(entry + 16):
            call_kernel(ops.iload64(entry), ops.iload64(entry + 8))
        if ops.iload64(entry + 24) != 0 and barrier != 0:
            call_barrier(barrier)


def load() -> None:
    """Compile or load the kernel that replays."""
    global _replay, call_kernel, call_barrier
    if _replay is not None:
        return
    runtime.load()
    from llvmlite import ir
    from numba.core import types

    def call(builder: Any, *values: Any) -> None:
        function = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * (len(values) - 1))
        builder.call(builder.inttoptr(values[0], function.as_pointer()), values[1:])

    call_kernel = ops.operation(types.void, (types.int64, types.int64), call)
    call_barrier = ops.operation(types.void, (types.int64,), call)
    _replay = runtime.compile_kernel(_replay_kernel)
