"""Quantization methods behind their front doors: what is packed, how exactly, how large."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from llmkit.errors import ModelError
from llmkit.hookspecs import Environment
from llmkit.hookspecs.quantization import QuantizationMethod
from llmkit.layers.config import DecoderConfig
from llmkit.layers.context import ModelContext
from llmkit.layers.decoder import DecoderForCausalLM
from llmkit.layers.module import Module
from llmkit_kernels.torch_table import TorchKernels
from llmkit_quantization.none import NoQuantization

KERNELS = TorchKernels()
ERROR = {"int8": 0.01, "int4": 0.12}  # of a product with normal random weights, in standard deviations of the result


def build(name: str, **options: Any) -> QuantizationMethod:
    door = importlib.import_module(f"llmkit_quantization.{name}")
    method: QuantizationMethod = door.llmkit_quantization(door.info.options(**options) if options else None)
    return method


def test_none_packs_nothing() -> None:
    door = importlib.import_module("llmkit_quantization.none")
    method = door.llmkit_quantization()
    assert method.pack(torch.ones(4, 4), "linear") is None
    assert method.nbytes(4, 5, "linear", torch.bfloat16) == 40
    with pytest.raises(TypeError):
        method.linear(torch.ones(1, 4), None, None, KERNELS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("t", "n", "k"), [(1, 96, 64), (7, 50, 160), (100, 64, 72)])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_product(name: str, t: int, n: int, k: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(n)
    x, weight, bias = (torch.randn(s, generator=generator).to(dtype) for s in ((t, k), (n, k), (n,)))
    method = build(name)
    packed = method.pack(weight, "linear")
    result = method.linear(x, packed, bias, KERNELS)
    assert result.dtype is dtype
    expected = x.double() @ weight.double().T + bias.double()
    assert (result.double() - expected).std() / expected.std() < ERROR[name] + (0.01 if dtype is torch.bfloat16 else 0)
    assert method.linear(x, packed, None, KERNELS).shape == (t, n)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_embedding_and_head_are_int8(name: str) -> None:
    weight = torch.randn(40, 64)
    method = build(name)
    for role in ("embedding", "lm_head"):
        packed: Any = method.pack(weight, role)
        assert packed.bits == 8
    rows = method.embedding(torch.tensor([39, 0, 0]), packed, torch.bfloat16)
    assert rows.dtype is torch.bfloat16
    torch.testing.assert_close(rows.float(), weight[[39, 0, 0]], rtol=2e-2, atol=3e-2)
    linear: Any = method.pack(weight, "linear")
    assert linear.bits == (8 if name == "int8" else 4)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_head_can_be_left_alone(name: str) -> None:
    method = build(name, lm_head="none")
    assert method.pack(torch.ones(4, 32), "lm_head") is None
    assert method.pack(torch.ones(4, 32), "embedding") is None
    assert method.pack(torch.ones(4, 32), "linear") is not None
    assert method.nbytes(4, 32, "lm_head", torch.float32) == 4 * 4 * 32


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_options_are_checked(name: str) -> None:
    options = importlib.import_module(f"llmkit_quantization.{name}").info.options
    for bad in ({"lm_head": "int3"}, {"head": "int8"}):
        with pytest.raises(ValidationError):
            options(**bad)


@pytest.mark.parametrize(("n", "k"), [(6, 64), (5, 72), (1, 1)])
@pytest.mark.parametrize("role", ["linear", "lm_head", "embedding"])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_bytes_are_known_before_packing(name: str, role: str, n: int, k: int) -> None:
    method = build(name)
    packed: Any = method.pack(torch.randn(n, k), role)
    assert method.nbytes(n, k, role, torch.float32) == packed.nbytes


Q4 = {"linear": frozenset({"Q4_0", "Q4_1"}), "embedding": frozenset({"Q8_0"})}
Q8 = {"linear": frozenset({"Q8_0"}), "embedding": frozenset({"Q8_0"}), "lm_head": frozenset({"Q8_0"})}


@pytest.mark.parametrize(("name", "stored"), [("int4", Q4), ("int8", Q8)])
def test_auto_takes_a_method_that_changes_nothing(name: str, stored: dict[str, frozenset[str]]) -> None:
    assert build(name).support(stored).score > NoQuantization().support(stored).score
    assert build(name).support(stored).reasons == ()
    assert " and ".join(sorted(stored["linear"])) in build(name).support(stored).grounds
    finer = stored | {"embedding": frozenset({"Q6_K"})}
    assert "embedding weights stored as Q6_K" in build(name).support(finer).reasons[0]
    assert build(name, lm_head="none").support(finer).reasons == ()


@pytest.mark.parametrize(
    ("name", "stored"),
    [("int4", {}), ("int8", {}), ("int4", Q8), ("int8", Q4), ("int4", {"linear": frozenset({"F16"})})],
)
def test_auto_leaves_out_a_method_that_changes_weights(name: str, stored: dict[str, frozenset[str]]) -> None:
    assert "only when named" in build(name).support(stored).reasons[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e7])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_values_that_cannot_be_held_are_refused(name: str, value: float) -> None:
    weight = torch.ones(4, 32)
    weight[1, 2] = value
    with pytest.raises(ModelError, match=rf"{name} can hold"):
        build(name).pack(weight, "linear")


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_they_need_the_cpu(name: str) -> None:
    door = importlib.import_module(f"llmkit_quantization.{name}")
    assert door.llmkit_problems(Environment(device_type="cpu")) == []
    assert any("needs the CPU" in p for p in door.llmkit_problems(Environment(device_type="cuda")))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["none", "int8", "int4"])
def test_a_model_is_packed_as_it_loads(name: str, tied: bool) -> None:
    raw = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "tie_word_embeddings": tied,
    }
    method = build(name) if name != "none" else importlib.import_module("llmkit_quantization.none").NoQuantization()
    context = ModelContext(DecoderConfig.from_hf(raw), torch.float32, torch.device("cpu"), KERNELS, method)
    model = DecoderForCausalLM(context)
    slots = {
        slot_name: torch.randn(slot.shape)
        for path, module in model.named_modules()
        if isinstance(module, Module)
        for slot_name, slot in module.weight_slots(path)
    }
    model.load_weights(slots.items())
    assert model.model.embed_tokens is not None
    assert model.lm_head is not None
    weight = model.model.embed_tokens.weight
    assert (weight.packed is None) == (name == "none")
    assert (weight.plain is None) == (name != "none")
    assert (model.lm_head.weight is weight) == tied
    hidden = torch.randn(3, 64)
    head = slots["model.embed_tokens.weight" if tied else "lm_head.weight"]
    torch.testing.assert_close(model.logits(hidden), hidden @ head.T, rtol=0.02, atol=0.4)
    plain = sum(4 * t.numel() for t in slots.values())
    assert model.parameter_bytes() == plain if name == "none" else model.parameter_bytes() < plain / 3
