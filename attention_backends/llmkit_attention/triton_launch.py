"""Kernel launches prepared once a step and made once a layer.

Triton looks at every argument of every launch to find the compiled kernel that it needs, which takes the host longer
than a small kernel takes the GPU. Here that is done for a launch's first layer. For the others only pointers differ,
and they are handed as numbers to the compiled kernel itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from llmkit.jit.rehearsal import launch

_ALIGNMENT = 16  # bytes; what a kernel was compiled to rely on, if the pointers of its first launch were so aligned

_compiled: dict[Hashable, Any] = {}
"""Compiled kernels by all that they are specialised for: Triton keeps them for the process as well."""


class PreparedLaunch:
    """A kernel with everything but its first arguments, which are tensors of the layer.

    The kernel's arguments are, in this order: tensors of the layer, `tensors` of the step, `strides`, which it may be
    specialised for, `numbers`, which it is not, and `constants`. All tensors are on the current device.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        tensors: tuple[torch.Tensor, ...],
        strides: tuple[int, ...],
        numbers: tuple[float, ...],
        constants: Mapping[str, Any],
        options: Mapping[str, int] | None = None,
    ) -> None:
        self._kernel, self._grid, self._tensors = kernel, grid, tensors
        self._tail = (*strides, *numbers)
        self._constants, self._options = constants, options or {}
        self._key = (kernel, strides, tuple(constants.values()), tuple(self._options.values()))
        self._pointers = tuple(x.data_ptr() for x in tensors)
        self._run: Any = None
        self._arguments: tuple[Any, ...] = ()

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Launch on the current stream. The tensors have the same types and strides every time."""
        pointers = [x.data_ptr() for x in tensors]
        joined = 0
        for pointer in pointers:
            joined |= pointer
        if joined % _ALIGNMENT:
            self._launch(tensors)
        elif self._run is not None:
            self._run(*pointers, *self._arguments)
        else:
            self._first(tensors, pointers)

    def _first(self, tensors: tuple[torch.Tensor, ...], pointers: list[int]) -> None:
        aligned = tuple(pointer % _ALIGNMENT == 0 for pointer in self._pointers)
        types = tuple(x.dtype for x in (*tensors, *self._tensors))
        key = (self._key, types, aligned, tensors[0].device.index)
        compiled = _compiled.get(key)
        if compiled is None:
            compiled = self._launch(tensors)
            if compiled is None:  # interpreted, or a rehearsal
                return
            _compiled[key] = compiled
        else:
            compiled[self._grid](*pointers, *self._pointers, *self._tail, *self._constants.values())
        self._run = compiled[self._grid]
        self._arguments = (*self._pointers, *self._tail, *self._constants.values())

    def _launch(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Through Triton, which compiles if need be; the compiled kernel."""
        return launch(
            self._kernel, self._grid, *tensors, *self._tensors, *self._tail, **self._constants, **self._options
        )
