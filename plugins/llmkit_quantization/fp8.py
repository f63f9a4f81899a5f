"""Front door of `fp8`: weights and activations as 8-bit floating-point numbers, for GPUs that multiply them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from llmkit.hookspecs import Environment, PluginInfo, hookimpl

if TYPE_CHECKING:
    from llmkit.hookspecs.quantization import QuantizationMethod

_LEAST_CAPABILITY = (8, 9)  # Ada and Hopper: the first whose matrix units take float8


class Fp8Options(BaseModel):
    """Options of fp8."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lm_head: Literal["fp8", "none"] = Field(
        default="none",
        description="How the embedding and the head are held: fp8, or none for the model's type, as their error goes "
        "into every logit directly.",
    )


info = PluginInfo(
    summary="weights as 8-bit floating-point numbers (e4m3) with a scale for each output, for CUDA GPUs",
    requires=("triton>=3.4",),
    extra="triton",
    options=Fp8Options,
)


@hookimpl
def llmkit_problems(environment: Environment) -> list[str]:
    problems = []
    if not environment.has_module("triton"):
        problems.append("needs triton, which is not installed")
    if environment.device_type != "cuda" and not _interpreted():
        problems.append(
            f"needs a CUDA GPU, as other devices do not multiply 8-bit floating-point numbers; the device is "
            f"{environment.device_type}"
        )
    capability = environment.compute_capability
    if capability is not None and capability < _LEAST_CAPABILITY:
        problems.append(f"needs compute capability 8.9; the GPU has {capability[0]}.{capability[1]}")
    return problems


@hookimpl
def llmkit_quantization(options: Fp8Options | None) -> QuantizationMethod:
    from llmkit_quantization.fp8_method import Fp8

    return Fp8(head=(options or Fp8Options()).lm_head == "fp8")


def _interpreted() -> bool:
    """Whether Triton, once imported, will interpret kernels instead of compiling them; as Triton reads it."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")
