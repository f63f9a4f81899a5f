"""Front door of the `triton` kernel table: fused operations for CUDA GPUs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from llmkit.hookspecs import Environment, PluginInfo, hookimpl

if TYPE_CHECKING:
    from llmkit.hookspecs.kernels import KernelTable

info = PluginInfo(
    summary="fused norms, rotary embedding, activation and sampling in Triton for CUDA GPUs",
    requires=("triton>=3.4",),
    extra="triton",
    rank=10,
)


@hookimpl
def llmkit_problems(environment: Environment) -> list[str]:
    problems = []
    if not environment.has_module("triton"):
        problems.append("needs triton, which is not installed")
    if environment.device_type != "cuda" and not _interpreted():
        problems.append(f"needs a CUDA GPU; the device is {environment.device_type}")
    return problems


@hookimpl
def llmkit_kernels() -> KernelTable:
    from llmkit_kernels.triton_table import TritonKernels

    return TritonKernels()


def _interpreted() -> bool:
    """Whether Triton, once imported, will interpret kernels instead of compiling them; as Triton reads it."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")
