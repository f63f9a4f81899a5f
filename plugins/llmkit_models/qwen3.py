"""Qwen3ForCausalLM: the dense Qwen 3; norms on the heads of queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.layers.config import DecoderConfig, LayerOptions

if TYPE_CHECKING:
    from llmkit.layers.causal_lm import CausalLM
    from llmkit.layers.context import ModelContext

info = PluginInfo(summary="Qwen 3, dense")

DEFAULTS: dict[str, object] = {
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def layer_options(config: DecoderConfig, index: int) -> LayerOptions:
    return LayerOptions(
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        qk_norm=True,
        sliding_window=config.window_by_layer(index),
    )


@hookimpl
def llmkit_model(context: ModelContext) -> CausalLM:
    from llmkit.layers.decoder import DecoderForCausalLM

    return DecoderForCausalLM(context, layer_options, defaults=DEFAULTS)
