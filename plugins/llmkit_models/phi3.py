"""Phi3ForCausalLM: Phi 3, 3.5 and 4; fused projections, partial rotary embedding, two sets of frequencies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.layers.config import DecoderConfig, LayerOptions

if TYPE_CHECKING:
    from llmkit.layers.causal_lm import CausalLM
    from llmkit.layers.context import ModelContext

info = PluginInfo(summary="Phi 3, 3.5 and 4, text")

DEFAULTS: dict[str, object] = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


def layer_options(config: DecoderConfig, _index: int) -> LayerOptions:
    return LayerOptions(sliding_window=config.sliding_window, fused_weights=True)


@hookimpl
def llmkit_model(context: ModelContext) -> CausalLM:
    from llmkit.layers.decoder import DecoderForCausalLM

    return DecoderForCausalLM(context, layer_options, defaults=DEFAULTS)
