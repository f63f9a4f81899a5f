"""MistralForCausalLM: no biases; a sliding window in every layer, if there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.layers.config import DecoderConfig, LayerOptions

if TYPE_CHECKING:
    from llmkit.layers.causal_lm import CausalLM
    from llmkit.layers.context import ModelContext

info = PluginInfo(summary="Mistral 7B and its relatives")

# A config.json that lacks these means the first release, so Hugging Face's defaults are its values.
DEFAULTS: dict[str, object] = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}


def layer_options(config: DecoderConfig, _index: int) -> LayerOptions:
    return LayerOptions(sliding_window=config.sliding_window)


@hookimpl
def llmkit_model(context: ModelContext) -> CausalLM:
    from llmkit.layers.decoder import DecoderForCausalLM

    return DecoderForCausalLM(context, layer_options, defaults=DEFAULTS)
