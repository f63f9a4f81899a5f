"""Front door of the `cpu` kernel table: compiled operations for the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmkit.hookspecs import Environment, PluginInfo, hookimpl

if TYPE_CHECKING:
    from llmkit.hookspecs.kernels import KernelTable

info = PluginInfo(
    summary="compiled CPU operations: products near memory bandwidth, fused norms, activation and rotary embedding",
    requires=("numba>=0.61",),
    rank=10,
)


@hookimpl
def llmkit_problems(environment: Environment) -> list[str]:
    problems = []
    if environment.device_type != "cpu":
        problems.append(f"needs the CPU; the device is {environment.device_type}")
    if not environment.has_module("numba"):
        problems.append("needs numba, which is not installed")
    return problems


@hookimpl
def llmkit_kernels() -> KernelTable:
    from llmkit_kernels.cpu_table import CPUKernels

    return CPUKernels()
