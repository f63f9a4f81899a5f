"""Experts: against their definition, over several workers, quantized, and what loading does with their weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from llmkit.errors import ModelError
from llmkit.layers.config import DecoderConfig, ExpertOptions
from llmkit.layers.context import ModelContext, ParallelLayout
from llmkit.layers.moe import SparseMLP
from llmkit.layers.weight_loader import load_into

Make = Callable[..., ModelContext]
OPTIONS = ExpertOptions(num_experts=5, num_experts_per_tok=2, intermediate_size=24)
HIDDEN = 32


def tensors_of(options: ExpertOptions = OPTIONS) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    gate, up, down = options.names
    shapes = {"gate.weight": (options.num_experts, HIDDEN)}
    for e in range(options.num_experts):
        shapes |= {f"experts.{e}.{name}.weight": (options.intermediate_size, HIDDEN) for name in (gate, up)}
        shapes[f"experts.{e}.{down}.weight"] = (HIDDEN, options.intermediate_size)
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def loaded(context: ModelContext, options: ExpertOptions = OPTIONS) -> SparseMLP:
    model = torch.nn.Module()
    model.block = SparseMLP(context, options)
    load_into(model, ((f"block.{name}", tensor) for name, tensor in tensors_of(options).items()))
    block: SparseMLP = model.block
    return block


def by_definition(x: torch.Tensor, options: ExpertOptions = OPTIONS) -> torch.Tensor:
    """Token by token and expert by expert."""
    weights = tensors_of(options)
    result = torch.zeros_like(x)
    for t, row in enumerate(x):
        scores = (weights["gate.weight"] @ row).softmax(0)
        chosen = scores.argsort(descending=True)[: options.num_experts_per_tok]
        total = scores[chosen].sum() if options.renormalise else 1.0
        for e in chosen.tolist():
            w1, w3, w2 = (weights[f"experts.{e}.{name}.weight"] for name in options.names)
            result[t] += scores[e] / total * (w2 @ (F.silu(w1 @ row) * (w3 @ row)))
    return result


X = torch.randn(13, HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        ExpertOptions(4, 1, 16, renormalise=False, names=("w1", "w3", "w2")),
        ExpertOptions(3, 3, 16),
        ExpertOptions(64, 2, 8),
    ],
)
def test_it_is_what_the_definition_says(make_context: Make, options: ExpertOptions) -> None:
    block = loaded(make_context(), options)
    torch.testing.assert_close(block.forward(X), by_definition(X, options), rtol=1e-4, atol=1e-5)
    assert block.forward(X[:0]).shape == (0, HIDDEN)


def test_a_token_does_not_depend_on_the_others(make_context: Make) -> None:
    block = loaded(make_context())
    together = block.forward(X)
    alone = torch.cat([block.forward(X[i : i + 1]) for i in range(len(X))])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_weights_are_stacked_and_counted(make_context: Make) -> None:
    block = loaded(make_context())
    stacked = block.experts.gate_up.stacked
    assert stacked is not None
    assert stacked.shape == (5, 48, HIDDEN)
    third = block.experts.gate_up.of_expert[3].plain
    assert third is not None
    assert third.data_ptr() == stacked[3].data_ptr()
    assert torch.equal(third[:24], tensors_of()["experts.3.gate_proj.weight"])
    assert block.experts.parameter_bytes() == 4 * 5 * 3 * 24 * HIDDEN
    assert block.gate.parameter_bytes() == 4 * 5 * HIDDEN
    assert block.experts.activation_width() == 3 * 2 * HIDDEN + 3 * 24


def test_workers_hold_a_part_of_every_expert(make_context: Make) -> None:
    parts = []
    for rank in range(2):
        layout = ParallelLayout(rank, 2, all_reduce=lambda x: x)
        block = loaded(make_context(parallel=layout))
        assert block.experts.gate_up.of_expert[0].shape == (24, HIDDEN)
        parts.append(block.forward(X))
    torch.testing.assert_close(parts[0] + parts[1], by_definition(X), rtol=1e-4, atol=1e-5)


def test_quantization_packs_experts_and_leaves_the_router(make_context: Make) -> None:
    from llmkit_quantization.int8 import llmkit_quantization

    options = ExpertOptions(4, 2, 32)
    block = loaded(make_context(quantization=llmkit_quantization(None)), options)
    assert block.experts.gate_up.stacked is None
    assert all(weight.packed is not None for weight in block.experts.down.of_expert)
    assert isinstance(block.gate.weight, torch.Tensor)
    expected = by_definition(X, options)
    assert (block.forward(X) - expected).abs().max() < 0.05 * expected.abs().max()


def test_in_bfloat16_the_outputs_are_added_up_in_float32(make_context: Make) -> None:
    block = loaded(make_context(dtype=torch.bfloat16))
    output = block.forward(X.bfloat16())
    assert output.dtype is torch.bfloat16
    expected = by_definition(X)
    assert (output.float() - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"num_experts": 4}, "num_experts_per_tok = 8; it must be at most the number of experts, 4"),
        ({"num_experts": 10**6}, "num_experts = 1000000"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok = 0"),
        ({"moe_intermediate_size": "x"}, "moe_intermediate_size"),
    ],
)
def test_bad_configurations(changes: dict[str, Any], part: str) -> None:
    raw = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    keys = {"num_experts_per_tok": 8, "moe_intermediate_size": 8}
    with pytest.raises(ModelError, match=part):
        ExpertOptions.read(DecoderConfig.from_hf(raw | keys | changes), "moe_intermediate_size", 128)


def test_a_missing_expert_is_named(make_context: Make) -> None:
    model = torch.nn.Module()
    model.mlp = SparseMLP(make_context(), OPTIONS)
    tensors = {f"mlp.{name}": tensor for name, tensor in tensors_of().items()}
    del tensors["mlp.experts.3.up_proj.weight"]
    with pytest.raises(ModelError, match=r"lacks the tensor mlp\.experts\.3\.up_proj\.weight"):
        load_into(model, tensors.items())
