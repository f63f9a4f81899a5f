from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llmkit import LLM, SamplingParams
from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.layers.module import Module, WeightSlot
from llmkit.registry import Registry, detect_environment
from llmkit.testing.conformance.arguments import small_context
from llmkit_weights import dummy
from llmkit_weights.dummy import DummyFormat
from llmkit_weights.dummy_tensors import _BLOCK, DummyValues


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """What the model of this configuration takes."""
    registry, environment = Registry.discover(), detect_environment()
    (architecture,) = config["architectures"]
    context = small_context(registry, environment, architecture, **config)
    model = registry.create("model", architecture, environment, context=context)
    shapes: dict[str, tuple[int, ...]] = model.weight_shapes()
    return shapes


def values(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    reader = DummyFormat(seed)
    reader.expect(shapes_of(config))
    return dict(reader.tensors(Path(), config))


def test_names_and_shapes_are_those_of_the_checkpoint(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    found = values(config)
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: tensor.shape for name, tensor in tensors.items()
    }


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


class Odd:
    """Front door of a foreign architecture, whose tensors are called and shaped as nobody else's."""

    info = PluginInfo("an architecture of somebody else")

    @staticmethod
    @hookimpl
    def llmkit_model(context: Any) -> Any:
        from llmkit.layers.decoder import DecoderForCausalLM

        model = DecoderForCausalLM(context, rename=lambda name: name.replace("transformer.h.", "model.layers."))
        model.extra = Extra()
        return model


class Extra(Module):
    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        yield f"{path}.table", WeightSlot((3, 5, 7), self.take)

    def take(self, tensor: torch.Tensor) -> None:
        self.table = tensor


def test_a_foreign_architecture_gets_its_tensors(config: dict[str, Any], llmkit_registry: Registry) -> None:
    llmkit_registry.register("model", "OddForCausalLM", Odd)
    overrides = config | {"architectures": ["OddForCausalLM"]}
    with LLM(load_format="dummy", overrides=overrides, num_blocks=8, num_threads=1, registry=llmkit_registry) as llm:
        output = llm.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 2


def test_auto_never_takes_it() -> None:
    assert dummy.info.auto is False
    assert DummyFormat.needs_files is False
