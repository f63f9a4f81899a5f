"""Front door of the `cpu` attention backend: compiled paged attention for the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmkit.hookspecs import Environment, PluginInfo, hookimpl
from llmkit.jit.support import kernel_problems

if TYPE_CHECKING:
    from llmkit.hookspecs.attention import AttentionBackend

info = PluginInfo(
    summary="compiled paged attention for the CPU: no gathering, no padding, prefill and decode mixed",
    requires=("numba>=0.61",),
    rank=10,
)


@hookimpl
def llmkit_problems(environment: Environment) -> list[str]:
    return kernel_problems(environment)


@hookimpl
def llmkit_attention_backend() -> AttentionBackend:
    from llmkit_attention.cpu_backend import CPUAttention

    return CPUAttention()
