"""Gemma3ForCausalLM: Gemma 3, text; sliding layers with a rotary embedding of their own, four norms a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmkit.errors import ModelError
from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.layers.config import DecoderConfig, LayerOptions
from llmkit.layers.config_reader import ConfigReader

if TYPE_CHECKING:
    from llmkit.layers.causal_lm import CausalLM
    from llmkit.layers.context import ModelContext

info = PluginInfo(summary="Gemma 3, text")

DEFAULTS: dict[str, object] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}


def layer_options(config: DecoderConfig, index: int) -> LayerOptions:
    read = ConfigReader(config.raw)
    if read.boolean("use_bidirectional_attention", False):
        raise ModelError("The model's config.json has use_bidirectional_attention: it is an encoder, not a decoder.")
    return LayerOptions(
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        qk_norm=True,
        output_norms=True,
        norm_offset=1.0,
        sliding_window=config.window_by_layer(index),
        scale=read.number_or("query_pre_attn_scalar", 256.0) ** -0.5,
        soft_cap=read.optional_number("attn_logit_softcapping"),
    )


@hookimpl
def llmkit_model(context: ModelContext) -> CausalLM:
    from llmkit.layers.decoder import DecoderForCausalLM

    return DecoderForCausalLM(
        context,
        layer_options,
        defaults=DEFAULTS,
        embedding_scale=context.config.hidden_size**0.5,
        logit_soft_cap=ConfigReader(context.config.raw).optional_number("final_logit_softcapping"),
    )
