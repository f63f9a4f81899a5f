"""Front door of the `torch` kernel table: the reference for all others, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmkit.hookspecs import PluginInfo, hookimpl

if TYPE_CHECKING:
    from llmkit.hookspecs.kernels import KernelTable

info = PluginInfo(summary="plain torch operations, on any device; the reference for the other tables")


@hookimpl
def llmkit_kernels() -> KernelTable:
    from llmkit_kernels.torch_table import TorchKernels

    return TorchKernels()
