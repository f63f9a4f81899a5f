"""Front door of `int4`: weight-only int4 for the CPU.

The embedding and the head are held in int8: their error goes into every logit directly, and int8 costs little there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from llmkit.hookspecs import Environment, PluginInfo, hookimpl
from llmkit.jit.support import kernel_problems

if TYPE_CHECKING:
    from llmkit.hookspecs.quantization import QuantizationMethod


class Int4Options(BaseModel):
    """Options of int4."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lm_head: Literal["int8", "none"] = Field(
        default="int8", description="How the embedding and the head are held: int8, or none for the model's type."
    )


info = PluginInfo(
    summary="weights as 4-bit integers in groups of 32 (embedding and head: 8-bit), for the CPU",
    requires=("numba>=0.61",),
    options=Int4Options,
)


@hookimpl
def llmkit_problems(environment: Environment) -> list[str]:
    return kernel_problems(environment)


@hookimpl
def llmkit_quantization(options: Int4Options | None) -> QuantizationMethod:
    from llmkit_quantization.weight_only import INT4, INT8, WeightOnly

    head = INT8 if (options or Int4Options()).lm_head == "int8" else None
    return WeightOnly({"linear": INT4, "lm_head": head, "embedding": head})
