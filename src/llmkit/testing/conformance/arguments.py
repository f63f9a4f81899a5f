"""Arguments for hooks that take more than options, where a check has no particular ones in mind."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from llmkit.frontend.token_vocabulary import TokenVocabulary
    from llmkit.hookspecs.connector import ConnectorBuilder
    from llmkit.hookspecs.kernels import KernelTable
    from llmkit.hookspecs.plugin import Environment
    from llmkit.hookspecs.quantization import QuantizationMethod
    from llmkit.layers.config import DecoderConfig
    from llmkit.layers.context import ModelContext
    from llmkit.registry import Registry

SMALL_MODEL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
"""Keys of a `config.json` for a decoder that is built in a moment."""


def default_arguments(
    kind: str, registry: Registry, environment: Environment, name: str, given: frozenset[str]
) -> dict[str, Any]:
    """The arguments of the kind's hook besides `options` and those in `given`. name: of the plugin, which for a model
    is its architecture. Imports torch for a model only."""
    makers: dict[str, dict[str, Callable[[], Any]]] = {
        "connector": {"build": lambda: _connector_builder(registry, environment)},
        "model": {"context": lambda: _example_context(registry, environment, name)},
        "structured": {"vocabulary": small_vocabulary},
        "weights": {"seed": lambda: 0},
    }
    return {argument: make() for argument, make in makers.get(kind, {}).items() if argument not in given}


def small_config(architecture: str, **keys: Any) -> DecoderConfig:
    """The configuration of a small model. `keys`: changes to SMALL_MODEL; None leaves a key out."""
    from llmkit.layers.config import DecoderConfig

    raw = {"architectures": [architecture], **SMALL_MODEL, **keys}
    return DecoderConfig.from_hf({key: value for key, value in raw.items() if value is not None})


def small_context(registry: Registry, environment: Environment, architecture: str, **keys: Any) -> ModelContext:
    """A context for a small model in float32 on the environment's device. `keys`: changes to SMALL_MODEL."""
    import torch

    from llmkit.layers.context import ModelContext

    return ModelContext(
        config=small_config(architecture, **keys),
        dtype=torch.float32,
        device=torch.device(environment.device_type),
        kernels=cast("KernelTable", registry.create("kernels", "auto", environment)),
        quantization=cast("QuantizationMethod", registry.create("quantization", "auto", environment)),
    )


def _example_context(registry: Registry, environment: Environment, name: str) -> ModelContext:
    from llmkit.testing.conformance.model_examples import context_for, example_config

    plugin = registry.load("model", name)
    return context_for(example_config(plugin), plugin, registry, environment)


def _connector_builder(registry: Registry, environment: Environment) -> ConnectorBuilder:
    from llmkit.execution.connector_half import connector_builder

    return connector_builder(registry, environment)


def small_vocabulary() -> TokenVocabulary:
    """Every byte, a few words, and one end-of-sequence token, in 320 logits."""
    from llmkit.frontend.token_vocabulary import TokenVocabulary
    from llmkit.testing.byte_tokenizer import ByteTokenizer

    tokenizer = ByteTokenizer()
    return TokenVocabulary.of(tokenizer, 320, [tokenizer.eos_token_id])
