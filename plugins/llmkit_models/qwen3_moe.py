"""Qwen3MoeForCausalLM: Qwen 3 with experts in all or some of its layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.layers.config import DecoderConfig, ExpertOptions, LayerOptions
from llmkit.layers.config_reader import ConfigReader

if TYPE_CHECKING:
    from llmkit.layers.causal_lm import CausalLM
    from llmkit.layers.context import ModelContext

info = PluginInfo(summary="Qwen 3 with experts, as 30B-A3B and 235B-A22B")

DEFAULTS: dict[str, object] = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
}


def layer_options(config: DecoderConfig, index: int) -> LayerOptions:
    read = ConfigReader(config.raw)
    is_dense = index in read.integers("mlp_only_layers") or (index + 1) % read.integer("decoder_sparse_step") != 0
    renormalise = read.boolean("norm_topk_prob", False)
    experts = ExpertOptions.read(config, "moe_intermediate_size", 128, renormalise=renormalise)
    return LayerOptions(
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        qk_norm=True,
        sliding_window=config.sliding_window,
        experts=None if is_dense else experts,
    )


@hookimpl
def llmkit_model(context: ModelContext) -> CausalLM:
    from llmkit.layers.decoder import DecoderForCausalLM

    return DecoderForCausalLM(context, layer_options, defaults=DEFAULTS)
