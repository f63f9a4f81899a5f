"""A small context to build layers with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from llmkit.layers.config import DecoderConfig
from llmkit.layers.context import ModelContext
from llmkit.layers.module import Module
from llmkit_kernels.torch_table import TorchKernels
from llmkit_quantization.none import NoQuantization

SMALL: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ContextFactory = Callable[..., ModelContext]


@pytest.fixture
def make_context() -> ContextFactory:
    """make_context(config keys=…, and any field of ModelContext) → a float32 CPU context of the reference table."""

    def make(config: dict[str, Any] | None = None, **fields: Any) -> ModelContext:
        plain = {
            "config": DecoderConfig.from_hf({**SMALL, **(config or {})}),
            "dtype": torch.float32,
            "device": torch.device("cpu"),
            "kernels": TorchKernels(),
            "quantization": NoQuantization(),
        }
        return ModelContext(**{**plain, **fields})

    return make


@pytest.fixture
def random_tensors() -> Callable[[Module], dict[str, torch.Tensor]]:
    """A random tensor for every weight slot of a model, by checkpoint name."""

    def draw(model: Module) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)

        def slots() -> Iterator[tuple[str, tuple[int, ...]]]:
            for path, module in model.named_modules():
                if isinstance(module, Module):
                    for name, slot in module.weight_slots(path):
                        yield name, slot.shape

        return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in slots()}

    return draw
