"""`transformers`: decoders of Hugging Face transformers, with llmkit's paged attention in place of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmkit.hookspecs import PluginInfo, hookimpl

if TYPE_CHECKING:
    from llmkit.hookspecs.attention import Support
    from llmkit.layers.causal_lm import CausalLM
    from llmkit.layers.context import ModelContext

info = PluginInfo(
    summary="any decoder of Hugging Face transformers whose attention can be replaced",
    requires=("transformers>=5.20",),
    rank=-10,
)


@hookimpl
def llmkit_model_support(config: Mapping[str, Any]) -> Support:
    from llmkit.hookspecs.attention import Support
    from llmkit_models.hosted.config import reasons_against

    return Support(reasons=tuple(reasons_against(config)))


@hookimpl
def llmkit_model_config(config: Mapping[str, Any]) -> dict[str, Any]:
    from llmkit_models.hosted.config import core_config

    return core_config(config)


@hookimpl
def llmkit_model_example() -> dict[str, Any]:
    from llmkit_models.hosted.config import EXAMPLE

    return dict(EXAMPLE)


@hookimpl
def llmkit_model(context: ModelContext) -> CausalLM:
    from llmkit_models.hosted.model import HostedCausalLM

    return HostedCausalLM(context)
