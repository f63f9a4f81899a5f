"""Front door of the `flashinfer` attention backend: the kernels of the FlashInfer library."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from llmkit.hookspecs import Environment, PluginInfo, hookimpl

if TYPE_CHECKING:
    from llmkit.hookspecs.attention import AttentionBackend


class FlashInferOptions(BaseModel):
    """Options of the FlashInfer backend."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workspace_mib: int = Field(
        default=512,
        ge=16,
        le=16384,
        description="MiB of GPU memory for what rows that are split over the GPU have computed so far, shared by all "
        "layers. More rows at a time and more query heads need more.",
    )


info = PluginInfo(
    summary="FlashInfer's paged attention for CUDA GPUs: work divided on the host once a step; compiled at first use",
    requires=("flashinfer-python>=0.6.12,<0.7", "triton>=3.4"),
    extra="flashinfer",
    options=FlashInferOptions,
)

_LEAST_CAPABILITY = (8, 0)


@hookimpl
def llmkit_problems(environment: Environment) -> list[str]:
    problems = []
    if not environment.has_module("flashinfer"):
        problems.append("needs FlashInfer, which is not installed: pip install 'flashinfer-python>=0.6.12,<0.7'")
    elif not (environment.has_module("flashinfer_jit_cache") or _finds_compiler()):
        problems.append(
            "FlashInfer compiles its kernels with nvcc, which was found neither on the PATH nor under CUDA_HOME or "
            "/usr/local/cuda: install CUDA's compiler, or the package flashinfer-jit-cache"
        )
    if environment.device_type != "cuda":
        problems.append(f"needs a CUDA GPU; the device is {environment.device_type}")
    capability = environment.compute_capability
    if capability is not None and capability < _LEAST_CAPABILITY:
        problems.append(f"needs compute capability 8.0; the GPU has {capability[0]}.{capability[1]}")
    return problems


@hookimpl
def llmkit_attention_backend(options: FlashInferOptions) -> AttentionBackend:
    from llmkit_attention.flashinfer_backend import FlashInferAttention

    return FlashInferAttention(options.workspace_mib)


def _finds_compiler() -> bool:
    """As FlashInfer looks for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which("nvcc") is not None or os.path.exists(os.path.join(home, "bin", "nvcc"))
