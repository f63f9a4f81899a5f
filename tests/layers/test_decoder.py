"""The decoder as a whole: what loading refuses, tied embeddings, sizes, pipeline stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmkit.errors import ModelError
from llmkit.layers.config import LayerOptions
from llmkit.layers.context import ForwardContext, ModelContext
from llmkit.layers.decoder import DecoderForCausalLM
from llmkit.layers.module import Module
from llmkit.testing.paged_attention import PagedPool
from llmkit_attention.torch_backend import TorchAttention

Make = Callable[..., ModelContext]
Tensors = dict[str, torch.Tensor]
Draw = Callable[[Module], Tensors]
IDS = torch.tensor([3, 1, 4, 1, 5])


def run(context: ModelContext, forward: Callable[..., Any]) -> Any:
    """forward(IDS, positions, a fresh forward context)."""
    backend, pool = TorchAttention(), PagedPool(8, 4)
    caches = pool.caches(backend, context.attention_layers, torch.float32)
    metadata = backend.plan(pool.step([(0, 5)]))
    return forward(torch.arange(5), ForwardContext(backend, [metadata] * len(caches), caches))


def logits(context: ModelContext, model: DecoderForCausalLM) -> torch.Tensor:
    result: torch.Tensor = run(context, lambda positions, c: model.logits(model(IDS, positions, c)))
    return result


def test_names_and_shapes_are_those_of_the_checkpoint(make_context: Make, random_tensors: Draw) -> None:
    tensors = random_tensors(DecoderForCausalLM(make_context()))
    assert len(tensors) == 3 * 9 + 3
    assert tensors["model.layers.2.self_attn.k_proj.weight"].shape == (16, 32)
    assert tensors["model.layers.0.mlp.up_proj.weight"].shape == (64, 32)
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} < tensors.keys()


def test_optional_parts_have_their_tensors(make_context: Make, random_tensors: Draw) -> None:
    options = LayerOptions(qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True)
    tensors = random_tensors(DecoderForCausalLM(make_context(), lambda _config, _index: options))
    prefix = "model.layers.1."
    for name in ("self_attn.q_proj.bias", "self_attn.o_proj.bias", "mlp.gate_proj.bias", "mlp.down_proj.bias"):
        assert prefix + name in tensors
    assert tensors[prefix + "self_attn.q_norm.weight"].shape == (8,)


def test_attention_layers_are_registered_in_order(make_context: Make) -> None:
    context = make_context()
    DecoderForCausalLM(context, lambda _, index: LayerOptions(sliding_window=None if index else 5, soft_cap=2.0))
    assert [layer.index for layer in context.attention_layers] == [0, 1, 2]
    assert [layer.sliding_window for layer in context.attention_layers] == [5, None, None]
    assert {layer.scale for layer in context.attention_layers} == {8**-0.5}


def test_parameter_bytes_before_loading_is_what_loading_takes(make_context: Make, random_tensors: Draw) -> None:
    model = DecoderForCausalLM(make_context(device=torch.device("meta"), dtype=torch.bfloat16))
    expected = model.parameter_bytes()
    assert expected == sum(2 * t.numel() for t in random_tensors(model).values())


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda t: t.pop("model.norm.weight"), ["lacks the tensor model.norm.weight"]),
        (lambda t: t.update(extra=torch.ones(1)), ["has the tensor extra", "does not use"]),
        (
            lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.ones(3, 32)}),
            ["model.layers.1.mlp.up_proj.weight", "[3, 32]", "[64, 32]"],
        ),
        (
            lambda t: t.update({"model.embed_tokens.weight": torch.ones(48, 32, dtype=torch.int8)}),
            ["model.embed_tokens.weight", "int8"],
        ),
        (
            lambda t: [t.pop(n) for n in list(t) if ".up_proj" in n or ".down_proj" in n or ".q_proj" in n],
            ["lacks 9 tensors: model.layers.0.self_attn.q_proj.weight", "and 3 more"],
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    make_context: Make, random_tensors: Draw, change: Callable[[Tensors], Any], parts: list[str]
) -> None:
    model = DecoderForCausalLM(make_context())
    tensors = random_tensors(model)
    change(tensors)
    with pytest.raises(ModelError) as caught:
        model.load_weights(tensors.items())
    for part in parts:
        assert part in str(caught.value)


def test_a_tensor_that_comes_twice_is_named(make_context: Make, random_tensors: Draw) -> None:
    model = DecoderForCausalLM(make_context())
    tensors = random_tensors(model)
    twice = [*tensors.items(), ("model.norm.weight", torch.ones(32))]
    with pytest.raises(ModelError, match=r"model\.norm\.weight twice"):
        model.load_weights(twice)


def test_derived_buffers_of_old_checkpoints_are_skipped(make_context: Make, random_tensors: Draw) -> None:
    model = DecoderForCausalLM(make_context())
    tensors = random_tensors(model)
    model.load_weights({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}.items())


def test_names_can_be_mapped(make_context: Make, random_tensors: Draw) -> None:
    context = make_context()

    def rename(name: str) -> str | None:
        return None if name == "vision.weight" else name.removeprefix("language.")

    model = DecoderForCausalLM(context, rename=rename)
    tensors = random_tensors(model)
    model.load_weights([("vision.weight", torch.ones(1)), *((f"language.{n}", t) for n, t in tensors.items())])
    assert logits(context, model).shape == (5, 48)


class TestTiedEmbeddings:
    """Case B84."""

    def build(self, make: Make, tied: bool) -> tuple[ModelContext, DecoderForCausalLM]:
        context = make({"tie_word_embeddings": tied})
        return context, DecoderForCausalLM(context)

    @pytest.fixture
    def tensors(self, make_context: Make, random_tensors: Draw) -> Tensors:
        """Of a tied model, without a head."""
        return random_tensors(self.build(make_context, True)[1])

    @pytest.fixture
    def expected(self, make_context: Make, tensors: Tensors) -> torch.Tensor:
        """(a) as is."""
        assert "lm_head.weight" not in tensors
        context, model = self.build(make_context, True)
        model.load_weights(tensors.items())
        result = logits(context, model)
        assert result.std() > 0.1
        return result

    def test_a_head_of_zeros_beside_the_tie_is_ignored(
        self, make_context: Make, tensors: Tensors, expected: torch.Tensor
    ) -> None:
        context, model = self.build(make_context, True)
        model.load_weights([*tensors.items(), ("lm_head.weight", torch.zeros(48, 32))])
        torch.testing.assert_close(logits(context, model), expected)

    def test_no_tie_and_no_head_is_an_error_that_names_it(self, make_context: Make, tensors: Tensors) -> None:
        _, model = self.build(make_context, False)
        with pytest.raises(ModelError, match=r"lm_head\.weight.*tie_word_embeddings"):
            model.load_weights(tensors.items())

    def test_a_head_of_its_own_is_used(self, make_context: Make, tensors: Tensors, expected: torch.Tensor) -> None:
        context, model = self.build(make_context, False)
        head = tensors["model.embed_tokens.weight"].clone()
        model.load_weights([*tensors.items(), ("lm_head.weight", head)])
        torch.testing.assert_close(logits(context, model), expected)
        context, model = self.build(make_context, False)
        model.load_weights([*tensors.items(), ("lm_head.weight", 2 * head)])
        torch.testing.assert_close(logits(context, model), 2 * expected)

    def test_one_storage(self, make_context: Make, tensors: Tensors) -> None:
        _, model = self.build(make_context, True)
        model.load_weights(tensors.items())
        assert model.lm_head is not None
        assert model.model.embed_tokens is not None
        assert model.lm_head.weight.plain is model.model.embed_tokens.weight.plain
        untied = self.build(make_context, False)[1]
        assert untied.parameter_bytes() - model.parameter_bytes() == 48 * 32 * 4


@pytest.mark.parametrize("tied", [False, True])
def test_pipeline_stages_give_what_the_whole_gives(make_context: Make, random_tensors: Draw, tied: bool) -> None:
    keys = {"tie_word_embeddings": tied}
    context = make_context(keys)
    whole = DecoderForCausalLM(context)
    tensors = random_tensors(whole)
    whole.load_weights(tensors.items())
    expected = logits(context, whole)
    state: Any = IDS
    for layers in (range(0, 1), range(1, 3)):
        stage_context = make_context(keys, layer_range=layers)
        stage = DecoderForCausalLM(stage_context)
        stage.load_weights(tensors.items())
        state = run(stage_context, lambda positions, c, stage=stage, state=state: stage.model(state, positions, c))
    assert stage.lm_head is not None
    assert stage.model.embed_tokens is None or tied
    torch.testing.assert_close(stage.logits(state), expected)


def test_weights_can_be_loaded_again(make_context: Make, random_tensors: Draw) -> None:
    context = make_context()
    model = DecoderForCausalLM(context)
    tensors = random_tensors(model)
    model.load_weights({name: torch.zeros_like(t) for name, t in tensors.items()}.items())
    model.load_weights(tensors.items())
    fresh_context = make_context()
    fresh = DecoderForCausalLM(fresh_context)
    fresh.load_weights(tensors.items())
    torch.testing.assert_close(logits(context, model), logits(fresh_context, fresh))


@pytest.mark.parametrize("output_norms", [False, True])
def test_rows_that_nobody_reads_may_be_left_out(make_context: Make, random_tensors: Draw, output_norms: bool) -> None:
    context = make_context()
    model = DecoderForCausalLM(context, lambda _config, _index: LayerOptions(output_norms=output_norms))
    model.load_weights(random_tensors(model).items())
    whole = run(context, lambda positions, c: model(IDS, positions, c))

    def some(positions: torch.Tensor, forward_context: ForwardContext) -> Any:
        forward_context.output_rows = torch.tensor([4, 1])
        return model(IDS, positions, forward_context)

    torch.testing.assert_close(run(context, some), whole[[4, 1]])
