"""Front door of `int8`: weight-only int8 for the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from llmkit.hookspecs import Environment, PluginInfo, hookimpl
from llmkit.jit.support import kernel_problems

if TYPE_CHECKING:
    from llmkit.hookspecs.quantization import QuantizationMethod


class Int8Options(BaseModel):
    """Options of int8."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lm_head: Literal["int8", "none"] = Field(
        default="int8", description="How the embedding and the head are held: int8, or none for the model's type."
    )


info = PluginInfo(
    summary="weights as 8-bit integers in groups of 32, for the CPU",
    requires=("numba>=0.61",),
    options=Int8Options,
)


@hookimpl
def llmkit_problems(environment: Environment) -> list[str]:
    return kernel_problems(environment)


@hookimpl
def llmkit_quantization(options: Int8Options | None) -> QuantizationMethod:
    from llmkit_quantization.weight_only import INT8, WeightOnly

    head = INT8 if (options or Int8Options()).lm_head == "int8" else None
    return WeightOnly({"linear": INT8, "lm_head": head, "embedding": head})
