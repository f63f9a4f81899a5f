"""Front door of the `flash_attn` attention backend: FlashAttention for prompts, the Triton kernels for decodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from llmkit.hookspecs import Environment, PluginInfo, hookimpl

if TYPE_CHECKING:
    from llmkit.hookspecs.attention import AttentionBackend


class FlashAttnOptions(BaseModel):
    """Options of the FlashAttention backend."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    least_tokens: int = Field(
        default=2048,
        ge=1,
        description="Steps of fewer tokens than this, and all decode steps, are left to the Triton kernels: a call of "
        "FlashAttention takes the host longer than they take the GPU.",
    )


info = PluginInfo(
    summary="FlashAttention 4 for steps with long prompts, the Triton kernels for all others; Hopper and Blackwell",
    requires=("flash-attn-4[cu13]>=4.0.0b36,<5", "triton>=3.4"),
    extra="flash-attn",
    options=FlashAttnOptions,
    rank=10,
)

GENERATIONS = (9, 10)
"""Major compute capabilities whose kernels take a paged cache: Hopper, Blackwell in data centres."""


@hookimpl
def llmkit_problems(environment: Environment) -> list[str]:
    problems = []
    if not environment.has_module("flash_attn"):
        problems.append("needs FlashAttention 4, which is not installed: pip install 'flash-attn-4[cu13]>=4.0.0b36,<5'")
    if environment.device_type != "cuda":
        problems.append(f"needs a CUDA GPU; the device is {environment.device_type}")
    capability = environment.compute_capability
    if capability is not None and capability[0] not in GENERATIONS:
        problems.append(
            f"FlashAttention 4 has a paged cache on compute capabilities 9.x and 10.x; the GPU has "
            f"{capability[0]}.{capability[1]}"
        )
    return problems


@hookimpl
def llmkit_attention_backend(options: FlashAttnOptions) -> AttentionBackend:
    from llmkit_attention.flash_attn_backend import FlashAttnAttention

    return FlashAttnAttention(options.least_tokens)
