"""Which model runner a device has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from llmkit.execution.model_runner import ModelRunner

if TYPE_CHECKING:
    import torch

    from llmkit.hookspecs.kernels import KernelTable


def runner_for(device: torch.device, kernels: KernelTable) -> Callable[..., ModelRunner]:
    """What makes the runner of `device`, from the arguments of `ModelRunner`."""
    if device.type != "cuda":
        return ModelRunner
    from llmkit.execution.cuda.runner import CudaModelRunner

    return partial(CudaModelRunner, kernels=kernels)


def concurrent_steps(device_type: str) -> int:
    """Steps that may be under way at once on a device of this type: on a GPU the host plans the next one while it
    computes; the CPU has nothing to overlap."""
    return 2 if device_type == "cuda" else 1
