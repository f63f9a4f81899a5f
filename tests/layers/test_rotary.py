"""Rotary embedding: frequencies against Hugging Face's, rotation against complex numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llmkit.errors import ModelError
from llmkit.layers.config import DecoderConfig
from llmkit.layers.context import ModelContext
from llmkit.layers.rope_config import RopeConfig
from llmkit.layers.rotary import RotaryEmbedding, attention_factor, inverse_frequencies
from llmkit_kernels.torch_table import TorchKernels

Make = Callable[..., ModelContext]
SIZES = {"hidden_size": 256, "num_attention_heads": 2, "max_position_embeddings": 4096}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1 + i / 64 for i in range(64)],
    "long_factor": [2 + i / 8 for i in range(64)],
}


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 4.0},
        {**LLAMA3, "original_max_position_embeddings": 1024},
        {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192, "rope_theta": 500000.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "truncate": False},
        {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0, "rope_theta": 1e6},
        {"rope_type": "dynamic", "factor": 2.0},
        {**LONGROPE, "original_max_position_embeddings": 1024},
        {**LONGROPE, "original_max_position_embeddings": 1024, "factor": 16.0, "partial_rotary_factor": 1.0},
        {**LONGROPE, "original_max_position_embeddings": 1024, "attention_factor": 1.25},
    ],
    ids=lambda p: p["rope_type"],
)
def test_frequencies_of_hugging_face(parameters: dict[str, Any]) -> None:
    theirs = LlamaConfig(rope_parameters=dict(parameters), **SIZES)
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](theirs, torch.device("cpu"))
    raw = {**SIZES, "rope_parameters": parameters, "vocab_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    rope = DecoderConfig.from_hf(raw).rope
    torch.testing.assert_close(inverse_frequencies(rope), frequencies, rtol=1e-6, atol=0)
    if parameters["rope_type"] == "longrope":
        longer, _ = ROPE_INIT_FUNCTIONS["longrope"](theirs, torch.device("cpu"), seq_len=1025)
        torch.testing.assert_close(inverse_frequencies(rope, 1024), frequencies, rtol=1e-6, atol=0)
        torch.testing.assert_close(inverse_frequencies(rope, 1025), longer, rtol=1e-6, atol=0)
    assert attention_factor(rope) == pytest.approx(factor, rel=1e-12)


def test_rotation_is_a_product_of_complex_numbers() -> None:
    rope = RopeConfig(rotary_dim=8, original_length=32)
    positions = torch.tensor([0, 3, 31, 3])
    query, key = torch.randn(4, 16), torch.randn(4, 8)
    expected = []
    for rows in (query, key):
        heads = rows.view(4, -1, 8)
        pairs = torch.complex(heads[..., :4].double(), heads[..., 4:].double())
        angles = positions[:, None, None].double() * inverse_frequencies(rope).double()
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        expected.append(torch.cat((turned.real, turned.imag), -1).flatten(1).float())
    angles = torch.arange(32)[:, None] * inverse_frequencies(rope)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    TorchKernels().rotary(positions, query, key, table, 8)
    torch.testing.assert_close(query, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(key, expected[1], rtol=1e-5, atol=1e-5)


def test_only_the_rotary_part_of_a_head_moves(make_context: Make) -> None:
    rotary = RotaryEmbedding(make_context({"partial_rotary_factor": 0.5}))
    query, key = torch.ones(2, 32), torch.ones(2, 16)
    rotary(torch.tensor([0, 5]), query, key)
    assert (query[0] == 1).all()
    heads = query[1].view(4, 8)
    assert (heads[:, 4:] == 1).all()
    assert (heads[:, :4] != 1).any()


def test_the_table_is_float32_made_late_and_as_long_as_the_context(make_context: Make) -> None:
    rotary = RotaryEmbedding(make_context(dtype=torch.bfloat16, max_model_len=500))
    assert rotary.table(torch.device("cpu")).shape == (500, 8)
    query, key = torch.ones(1, 32).bfloat16(), torch.ones(1, 16).bfloat16()
    rotary(torch.tensor([499]), query, key)
    assert rotary.table(torch.device("cpu")).dtype is torch.float32
    assert RotaryEmbedding(make_context()).table(torch.device("cpu")).shape[0] == 64


def test_dynamic_stops_where_it_would_change_the_past(make_context: Make) -> None:
    keys = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    RotaryEmbedding(make_context(keys, max_model_len=64))
    with pytest.raises(ModelError, match=r"dynamic.*64 tokens, not 65.*max-model-len"):
        RotaryEmbedding(make_context(keys, max_model_len=65))
