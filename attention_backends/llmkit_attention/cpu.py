"""Front door of the `cpu` attention backend: compiled paged attention for the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmkit.hookspecs import Environment, PluginInfo, hookimpl

if TYPE_CHECKING:
    from llmkit.hookspecs.attention import AttentionBackend

info = PluginInfo(
    summary="compiled paged attention for the CPU: no gathering, no padding, prefill and decode mixed",
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
def llmkit_attention_backend() -> AttentionBackend:
    from llmkit_attention.cpu_backend import CPUAttention

    return CPUAttention()
