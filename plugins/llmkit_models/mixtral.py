"""MixtralForCausalLM: Mistral's layers with experts in place of the feed-forward block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.layers.config import DecoderConfig, ExpertOptions, LayerOptions

if TYPE_CHECKING:
    from llmkit.layers.causal_lm import CausalLM
    from llmkit.layers.context import ModelContext

info = PluginInfo(summary="Mixtral 8x7B and 8x22B: Mistral with experts")

DEFAULTS: dict[str, object] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "num_experts_per_tok": 2,
}


def layer_options(config: DecoderConfig, _index: int) -> LayerOptions:
    experts = ExpertOptions.read(config, "intermediate_size", 8, names=("w1", "w3", "w2"))
    return LayerOptions(sliding_window=config.sliding_window, experts=experts, feed_forward="block_sparse_moe")


@hookimpl
def llmkit_model(context: ModelContext) -> CausalLM:
    from llmkit.layers.decoder import DecoderForCausalLM

    return DecoderForCausalLM(context, layer_options, defaults=DEFAULTS)
