"""LlamaForCausalLM: Llama 1 to 3.x and the many models of the same shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.layers.config import DecoderConfig, LayerOptions

if TYPE_CHECKING:
    from llmkit.layers.causal_lm import CausalLM
    from llmkit.layers.context import ModelContext

info = PluginInfo(summary="Llama, SmolLM and other plain decoders")


def layer_options(config: DecoderConfig, _index: int) -> LayerOptions:
    return LayerOptions(qkv_bias=config.attention_bias, output_bias=config.attention_bias, mlp_bias=config.mlp_bias)


@hookimpl
def llmkit_model(context: ModelContext) -> CausalLM:
    from llmkit.layers.decoder import DecoderForCausalLM

    return DecoderForCausalLM(context, layer_options)
