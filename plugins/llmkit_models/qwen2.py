"""Qwen2ForCausalLM: Qwen 2 and 2.5; biases on the projections to queries, keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.layers.config import DecoderConfig, LayerOptions

if TYPE_CHECKING:
    from llmkit.layers.causal_lm import CausalLM
    from llmkit.layers.context import ModelContext

info = PluginInfo(summary="Qwen 2 and 2.5")

# The window is given in most of these configurations but not in use.
DEFAULTS: dict[str, object] = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def layer_options(config: DecoderConfig, index: int) -> LayerOptions:
    return LayerOptions(qkv_bias=True, sliding_window=config.window_by_layer(index))


@hookimpl
def llmkit_model(context: ModelContext) -> CausalLM:
    from llmkit.layers.decoder import DecoderForCausalLM

    return DecoderForCausalLM(context, layer_options, defaults=DEFAULTS)
