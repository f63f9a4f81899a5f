from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from llmkit.errors import ModelError
from llmkit_weights import dummy
from llmkit_weights.dummy import DummyFormat
from llmkit_weights.dummy_tensors import _BLOCK, DummyValues


def values(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    return dict(DummyFormat(seed).tensors(Path(), config))


def test_names_and_shapes_are_those_of_the_checkpoint(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    found = values(config)
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: tensor.shape for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(
    ("change", "added"),
    [
        ({"tie_word_embeddings": False}, {"lm_head.weight"}),
        ({"architectures": ["Qwen3ForCausalLM"]}, {"q_norm.weight", "k_norm.weight"}),
        ({"architectures": ["Qwen2ForCausalLM"]}, {"q_proj.bias", "k_proj.bias", "v_proj.bias"}),
        ({"attention_bias": True}, {"q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias"}),
        ({"mlp_bias": True}, {"gate_proj.bias", "up_proj.bias", "down_proj.bias"}),
    ],
)
def test_what_configurations_add(config: dict[str, Any], change: dict[str, Any], added: set[str]) -> None:
    more = values(config | change).keys() - values(config).keys()
    assert {name if name == "lm_head.weight" else ".".join(name.split(".")[-2:]) for name in more} == added


def test_values_are_scaled_and_typed(config: dict[str, Any]) -> None:
    found = values(config | {"initializer_range": 0.1, "dtype": "bfloat16"})
    embedding = found["model.embed_tokens.weight"]
    assert embedding.dtype == torch.bfloat16
    assert embedding.float().std().item() == pytest.approx(0.1, rel=0.1)
    assert torch.equal(found["model.norm.weight"], torch.ones(64, dtype=torch.bfloat16))


def test_values_depend_on_seed_and_name_only(config: dict[str, Any]) -> None:
    first, again, other = values(config, 1), values(config, 1), values(config, 2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], first["model.layers.0.mlp.gate_proj.weight"])
    assert torch.equal(values(config | {"num_hidden_layers": 2}, 1)[name], first[name])


def test_large_tensors_repeat_no_row() -> None:
    tensor = DummyValues(0, {}).tensor("x", (3 * _BLOCK // 1024, 1024))
    assert len(torch.unique(tensor[:, :8], dim=0)) == tensor.shape[0]
    assert tensor.std().item() == pytest.approx(0.02, rel=0.02)


def test_reads_the_small_files_of_a_folder(model_folder: Path, config: dict[str, Any]) -> None:
    reader = DummyFormat(0)
    assert reader.recognises(model_folder)
    assert reader.config(model_folder) == json.loads(json.dumps(config))
    assert reader.generation_config(model_folder) == {}
    assert reader.tokenizer(model_folder) is None


def test_bad_configuration(config: dict[str, Any]) -> None:
    del config["hidden_size"]
    with pytest.raises(ModelError, match="lacks hidden_size"):
        values(config)


def test_auto_never_takes_it() -> None:
    assert dummy.info.auto is False
    assert DummyFormat.needs_files is False
