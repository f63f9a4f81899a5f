"""Norms computed with the products behind them, where the kernel table has one kernel for both, and products whose sum
is left to the norm; scores and logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from llmkit.layers.config import LayerOptions
from llmkit.layers.context import ForwardContext, ModelContext
from llmkit.layers.decoder import DecoderForCausalLM
from llmkit.testing.paged_attention import PagedPool
from llmkit_attention.torch_backend import TorchAttention
from llmkit_kernels.torch_table import TorchKernels
from llmkit_quantization.none import NoQuantization

IDS = torch.tensor([3, 1, 4, 1, 5])


class AtOnce(TorchKernels):
    def __init__(self, takes: bool = True) -> None:
        self.takes, self.calls = takes, []

    def add_rms_norm_linear(self, x, residual, norm, eps, weight, bias=None):
        self.calls.append("linear" if bias is None else "biased")
        if not self.takes:
            return None
        normed, total = self.add_rms_norm(x, residual, norm, eps)
        return self.linear(normed, weight, bias), total

    def add_rms_norm_silu(self, x, residual, norm, eps, weight):
        self.calls.append("silu")
        if not self.takes:
            return None
        normed, total = self.add_rms_norm(x, residual, norm, eps)
        return self.silu_and_mul(self.linear(normed, weight)), total


class InParts(TorchKernels):
    """Sums of products of the first and the second half of the columns."""

    def __init__(self) -> None:
        self.in_parts = self.summed = 0

    def linear_in_parts(self, x, weight, bias=None):
        if bias is not None:
            return None
        self.in_parts += 1
        halves = zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True)
        return torch.stack([self.linear(*half) for half in halves])

    def add_rms_norm(self, x, residual, weight, eps):
        if x.dim() == 3:
            self.summed += 1
            x = x.sum(0)
        return super().add_rms_norm(x, residual, weight, eps)


def logits(context: ModelContext, model: DecoderForCausalLM) -> torch.Tensor:
    backend, pool = TorchAttention(), PagedPool(8, 4)
    caches = pool.caches(backend, context.attention_layers, torch.float32)
    forward = ForwardContext(backend, [backend.plan(pool.step([(0, len(IDS))]))] * len(caches), caches)
    return model.logits(model(IDS, torch.arange(len(IDS)), forward))


@pytest.mark.parametrize("takes", [True, False])
@pytest.mark.parametrize(
    ("options", "first", "later"),
    [
        (LayerOptions(), ["silu"], ["linear", "silu"]),
        (LayerOptions(qkv_bias=True, mlp_bias=True), [], ["biased"]),
        (LayerOptions(output_norms=True), [], ["linear"]),
    ],
)
def test_the_layers_compute_the_same(
    make_context: Callable[..., ModelContext],
    random_tensors: Callable[[DecoderForCausalLM], dict[str, torch.Tensor]],
    options: LayerOptions,
    first: list[str],
    later: list[str],
    takes: bool,
) -> None:
    """first, later: what is asked of the table for the first layer, whose norm has nothing to add, and the others."""
    results, table = [], AtOnce(takes)
    for kernels in (TorchKernels(), table):
        context = make_context(kernels=kernels)
        model = DecoderForCausalLM(context, lambda *_: options)
        model.load_weights(random_tensors(model).items())
        results.append(logits(context, model))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    assert table.calls == first + 2 * later


@pytest.mark.parametrize(
    ("options", "per_layer"),
    [(LayerOptions(), 2), (LayerOptions(output_bias=True, mlp_bias=True), 0), (LayerOptions(output_norms=True), 0)],
)
def test_the_norm_adds_up_what_products_leave_in_parts(
    make_context: Callable[..., ModelContext],
    random_tensors: Callable[[DecoderForCausalLM], dict[str, torch.Tensor]],
    options: LayerOptions,
    per_layer: int,
) -> None:
    """Of attention and feed-forward, in every layer; not where a bias or another norm comes in between."""
    results, table = [], InParts()
    for kernels in (TorchKernels(), table):
        context = make_context(kernels=kernels)
        model = DecoderForCausalLM(context, lambda *_: options)
        model.load_weights(random_tensors(model).items())
        results.append(logits(context, model))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    assert table.in_parts - table.summed == 0
    assert table.summed == per_layer * len(context.attention_layers)


def test_a_stage_hands_on_what_is_added_up(
    make_context: Callable[..., ModelContext],
    random_tensors: Callable[[DecoderForCausalLM], dict[str, torch.Tensor]],
) -> None:
    results = []
    for kernels in (TorchKernels(), InParts()):
        whole = DecoderForCausalLM(make_context(kernels=kernels))
        context = make_context(kernels=kernels, layer_range=range(0, 1))
        stage = DecoderForCausalLM(context)
        stage.load_weights(random_tensors(whole).items())
        backend, pool = TorchAttention(), PagedPool(8, 4)
        caches = pool.caches(backend, context.attention_layers, torch.float32)
        forward = ForwardContext(backend, [backend.plan(pool.step([(0, len(IDS))]))], caches)
        results.append(stage.model(IDS, torch.arange(len(IDS)), forward))
    for actual, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


class PackedAtOnce(NoQuantization):
    """Weights of linear layers as they are, in a list; records what it is asked for."""

    def __init__(self, takes: bool) -> None:
        self.takes, self.calls = takes, []

    def pack(self, weight, role):
        return [weight] if role == "linear" else None

    def linear(self, x, packed, bias, kernels):
        return kernels.linear(x, packed[0], bias)

    def add_rms_norm_linear(self, x, residual, norm, eps, packed, bias, kernels):
        self.calls.append("linear" if bias is None else "biased")
        return kernels.add_rms_norm_linear(x, residual, norm, eps, packed[0], bias) if self.takes else None

    def add_rms_norm_silu(self, x, residual, norm, eps, packed, kernels):
        self.calls.append("silu")
        return kernels.add_rms_norm_silu(x, residual, norm, eps, packed[0]) if self.takes else None


@pytest.mark.parametrize("takes", [True, False])
@pytest.mark.parametrize(
    ("options", "first", "later"),
    [
        (LayerOptions(), ["silu"], ["linear", "silu"]),
        (LayerOptions(qkv_bias=True, mlp_bias=True), [], ["biased"]),
    ],
)
def test_packed_weights_compute_the_same(
    make_context: Callable[..., ModelContext],
    random_tensors: Callable[[DecoderForCausalLM], dict[str, torch.Tensor]],
    options: LayerOptions,
    first: list[str],
    later: list[str],
    takes: bool,
) -> None:
    """The quantization is asked in place of the table, for the same products."""
    results, method = [], PackedAtOnce(takes)
    for settings in ({}, {"quantization": method, "kernels": AtOnce()}):
        context = make_context(**settings)
        model = DecoderForCausalLM(context, lambda *_: options)
        model.load_weights(random_tensors(model).items())
        results.append(logits(context, model))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    assert method.calls == first + 2 * later


@pytest.mark.parametrize("cap", [None, 3.0])
def test_scores_are_the_logits(
    make_context: Callable[..., ModelContext],
    random_tensors: Callable[[DecoderForCausalLM], dict[str, torch.Tensor]],
    cap: float | None,
) -> None:
    """In the type of the model where nothing is done to them."""
    context = make_context(dtype=torch.bfloat16)
    model = DecoderForCausalLM(context, lambda *_: LayerOptions(), logit_soft_cap=cap)
    model.load_weights(random_tensors(model).items())
    hidden = torch.randn(3, 32).bfloat16() * 4
    scores = model.scores(hidden)
    assert scores.dtype is (torch.bfloat16 if cap is None else torch.float32)
    assert torch.equal(scores.float(), model.logits(hidden))
