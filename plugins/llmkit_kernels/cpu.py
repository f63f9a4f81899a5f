"""Front door of the `cpu` kernel table: compiled operations for the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmkit.hookspecs import Environment, PluginInfo, hookimpl
from llmkit.jit.support import kernel_problems

if TYPE_CHECKING:
    from llmkit.hookspecs.kernels import KernelTable

info = PluginInfo(
    summary="compiled CPU operations: products near memory bandwidth, fused norms, activation and rotary embedding",
    requires=("numba>=0.61",),
    rank=10,
)


@hookimpl
def llmkit_problems(environment: Environment) -> list[str]:
    return kernel_problems(environment)


@hookimpl
def llmkit_kernels() -> KernelTable:
    from llmkit_kernels.cpu_table import CPUKernels

    return CPUKernels()
