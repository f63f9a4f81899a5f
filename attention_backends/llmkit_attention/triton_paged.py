"""Front door of the `triton` attention backend: paged attention on CUDA GPUs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from llmkit.hookspecs import Environment, PluginInfo, hookimpl

if TYPE_CHECKING:
    from llmkit.hookspecs.attention import AttentionBackend

info = PluginInfo(
    summary="paged attention in Triton for CUDA GPUs: prompts and decodes mixed, long sequences split over the GPU",
    requires=("triton>=3.4",),
    extra="triton",
    rank=10,
)

_LEAST_CAPABILITY = (8, 0)  # bfloat16 and asynchronous copies; what Triton itself supports


@hookimpl
def llmkit_problems(environment: Environment) -> list[str]:
    problems = []
    if not environment.has_module("triton"):
        problems.append("needs triton, which is not installed")
    if environment.device_type != "cuda" and not _interpreted():
        problems.append(
            f"needs a CUDA GPU; the device is {environment.device_type}. For tests, TRITON_INTERPRET=1 runs it on the "
            "CPU, thousands of times slower"
        )
    capability = environment.compute_capability
    if capability is not None and capability < _LEAST_CAPABILITY:
        problems.append(f"needs compute capability 8.0; the GPU has {capability[0]}.{capability[1]}")
    return problems


@hookimpl
def llmkit_attention_backend() -> AttentionBackend:
    from llmkit_attention.triton_backend import TritonAttention

    return TritonAttention()


def _interpreted() -> bool:
    """Whether Triton, once imported, will interpret kernels instead of compiling them; as Triton reads it."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")
