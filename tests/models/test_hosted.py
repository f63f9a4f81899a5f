"""Models of transformers with llmkit's attention: the same logits in any pieces, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from llmkit import LLM, SamplingParams
from llmkit.errors import ModelError
from llmkit.layers.causal_lm import CausalLM
from llmkit.layers.context import ModelContext, ParallelLayout
from llmkit.registry import LoadedPlugin, Registry, detect_environment
from llmkit.testing.conformance.model_examples import checkpoint_of, context_for, reference_model, shrunk_config
from llmkit.testing.models import ModelTrial, relative_error
from llmkit_attention.torch_backend import TorchAttention

transformers = pytest.importorskip("transformers")

LENGTHS = {0: 40, 1: 23, 2: 9}
SEQUENCES = {s: torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(s)) for s, n in LENGTHS.items()}
CHUNKS = [{0: 10, 1: 5}, {1: 1, 0: 13, 2: 7}, {0: 1, 1: 1, 2: 1}, {2: 1, 0: 1, 1: 9}, {0: 15, 1: 7}]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.5],
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover()


@pytest.fixture(scope="module")
def plugin(registry: Registry) -> LoadedPlugin:
    return registry.load("model", "transformers")


def small(architecture: str, **changes: Any) -> dict[str, Any]:
    raw = shrunk_config(architecture)
    assert raw is not None
    return {key: value for key, value in {**raw, **changes}.items() if value is not None}


Build = Callable[..., tuple[CausalLM, ModelContext]]


@pytest.fixture
def build(registry: Registry, plugin: LoadedPlugin) -> Build:
    """build(config, fields of ModelContext…) → the model without weights, and its context."""

    def make(raw: dict[str, Any], quantization: str = "none", **fields: Any) -> tuple[CausalLM, ModelContext]:
        context = context_for(raw, plugin, registry, detect_environment(), quantization=quantization)
        for name, value in fields.items():
            setattr(context, name, value)
        return registry.build(plugin, {"context": context}), context

    return make


def run(model: CausalLM, context: ModelContext, sequences: dict[int, torch.Tensor] = SEQUENCES) -> Any:
    trial = ModelTrial(model, context.attention_layers, TorchAttention(), dtype=context.dtype)
    return trial.run(sequences, CHUNKS)


CASES: dict[str, tuple[str, dict[str, Any], list[int | None]]] = {
    "post norms, caps, windows": (
        "Gemma2ForCausalLM",
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 30},
        [9, None, 9, None],
    ),
    "learned positions, transposed weights": ("GPT2LMHeadModel", {}, [None] * 4),
    "parallel blocks": ("GPTNeoXForCausalLM", {}, [None] * 4),
    "a body inside the body": ("OPTForCausalLM", {"ffn_dim": 80, "word_embed_proj_dim": 48}, [None] * 4),
    "experts": ("Qwen3MoeForCausalLM", {"norm_topk_prob": True, "num_local_experts": 12}, [9] * 4),
    "logit scale, no rope in some layers": ("Cohere2ForCausalLM", {}, [9, 9, 9, None]),
    "rope by kind of layer": ("Gemma3ForCausalLM", {}, [9, 9, 9, 9]),
    "renamed and split": ("Glm4MoeForCausalLM", {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}, [None] * 4),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_of_transformers(case: str, build: Build) -> None:
    architecture, changes, windows = CASES[case]
    raw = small(architecture, **changes)
    theirs = reference_model(raw)
    model, context = build(raw)
    # Sorted by text, as files are: "10" comes before "2".
    model.load_weights(sorted(checkpoint_of(theirs).items()))
    assert [layer.sliding_window for layer in context.attention_layers] == windows
    result = run(model, context)
    for s, ids in SEQUENCES.items():
        with torch.inference_mode():
            expected = theirs(ids[None], use_cache=False).logits[0]
        assert relative_error(result[s], expected) < 1e-4


@pytest.mark.parametrize("length", [64, 8])
def test_frequencies_do_not_change_with_the_longest_row(build: Build, length: int) -> None:
    """transformers takes the long ones for a whole batch as soon as one of its rows is long."""
    keys = {"rope_parameters": LONGROPE, "original_max_position_embeddings": length, "head_dim": None}
    raw = small("Phi3ForCausalLM", **keys)
    theirs = reference_model(raw)
    model, context = build(raw, max_model_len=64)
    model.load_weights(checkpoint_of(theirs).items())
    result = run(model, context)
    for s, ids in SEQUENCES.items():
        with torch.inference_mode():
            expected = theirs(ids[None], use_cache=False).logits[0]
        assert relative_error(result[s], expected) < 1e-4


def test_dynamic_frequencies_end_where_they_would_change(build: Build) -> None:
    raw = small("LlamaForCausalLM", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert build(raw)
    with pytest.raises(ModelError, match='"dynamic", which is supported up to 256 tokens, not 300'):
        build(raw, max_model_len=300)


MLA = {
    "num_key_value_heads": 6, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "kv_lora_rank": 16,
    "q_lora_rank": 24, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "head_dim": 8,
}  # fmt: skip
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "latent attention": ("DeepseekV3ForCausalLM", MLA, "queries, keys and values of different sizes"),
    "sinks": ("GptOssForCausalLM", {}, "asks for attention with s_aux"),
    "both directions": ("BertLMHeadModel", {}, "its attention is not causal"),
    "attention of its own": ("FalconForCausalLM", {}, "attention of its own that cannot be exchanged"),
    "position biases": ("BloomForCausalLM", {}, "does not go through transformers' attention interface"),
    "twice in a layer": ("DiffLlamaForCausalLM", {}, "calls an attention layer more than once"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_cannot_be_hosted(case: str, build: Build) -> None:
    architecture, changes, reason = REFUSED[case]
    with pytest.raises(ModelError, match=f"cannot run with paged attention: .*{reason}"):
        build(small(architecture, **changes))


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"architectures": ["OddForCausalLM"]}, "has no causal language model called OddForCausalLM"),
        ({"architectures": ["MambaForCausalLM"]}, "layers other than full and sliding attention: linear_attention"),
        ({"architectures": ["BartForCausalLM"]}, "encoder-decoder"),
        ({"architectures": ["MusicgenForCausalLM"]}, "several models of text"),
        ({"architectures": ["LlamaForCausalLM"], "num_attention_heads": "many"}, "cannot read the model's config.json"),
        ({"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "x"}}, "stored quantized"),
        ({"architectures": ["Llama4ForCausalLM"]}, "chunked_attention"),
    ],
)
def test_reasons_that_the_configuration_tells(raw: dict[str, Any], reason: str, plugin: LoadedPlugin) -> None:
    (found,) = plugin.ask("llmkit_model_support", config=raw).reasons
    assert reason in found


def test_window_of_a_mask() -> None:
    from llmkit_models.hosted.probe import window_of

    def sliding(window: int) -> Any:
        return lambda _b, _h, q, k: (k <= q) & (k > q - window)

    assert window_of(None) is None
    assert window_of(lambda _b, _h, q, k: k <= q) is None
    assert [window_of(sliding(n)) for n in (1, 9, 4096, 131072)] == [1, 9, 4096, 131072]
    for mask, reason in {
        "not causal": lambda _b, _h, q, k: k >= 0 * q,
        "gaps": lambda _b, _h, q, k: (k <= q) & (k % 2 == 0),
        "of one width": lambda _b, _h, q, k: (k <= q) & (k // 1000 == q // 1000),
        "not known beforehand": lambda _b, _h, q, k: torch.empty(3, device="meta").nonzero(),  # noqa: ARG005
    }.items():
        with pytest.raises(ModelError, match=mask):
            window_of(reason)


def test_code_that_comes_with_a_model_is_not_run(plugin: LoadedPlugin, build: Build) -> None:
    raw = small("LlamaForCausalLM", auto_map={"AutoConfig": "no.Such", "AutoModelForCausalLM": "no.Such"})
    assert plugin.ask("llmkit_model_support", config=raw).reasons == ()
    assert build(raw)


def test_bad_tensors_are_named(build: Build) -> None:
    raw = small("Qwen3MoeForCausalLM")
    good = checkpoint_of(reference_model(raw))

    def fails(message: str, **changes: torch.Tensor | None) -> None:
        tensors = {**good, **{name.replace("__", "."): tensor for name, tensor in changes.items()}}
        model, _ = build(raw)
        with pytest.raises(ModelError, match=message):
            model.load_weights((name, tensor) for name, tensor in tensors.items() if tensor is not None)

    expert = "model__layers__1__mlp__experts__3__up_proj__weight"
    fails(r"lacks the tensor model\.norm\.weight", model__norm__weight=None)
    fails(r"has the tensor model\.extra\.weight, which", model__extra__weight=torch.zeros(3))
    fails(r"model\.norm\.weight has the shape \[3\]", model__norm__weight=torch.zeros(3))
    fails(
        r"layers\.1\.mlp\.experts.*cannot be made into model\.layers\.1\.mlp\.experts\.gate_up_proj", **{expert: None}
    )
    fails(r"cannot be made into model\.layers\.1\.mlp\.experts\.gate_up_proj", **{expert: torch.zeros(5, 48)})


def test_tied_and_not(build: Build) -> None:
    for tied in (True, False):
        raw = small("LlamaForCausalLM", tie_word_embeddings=tied)
        theirs = reference_model(raw)
        tensors = checkpoint_of(theirs)
        assert ("lm_head.weight" in tensors) is not tied
        model, context = build(raw)
        if tied:  # whatever else the file has under this name must not replace the embedding
            tensors["lm_head.weight"] = torch.zeros(97, 48)
        model.load_weights(tensors.items())
        with torch.inference_mode():
            expected = theirs(SEQUENCES[0][None]).logits[0]
        assert relative_error(run(model, context)[0], expected) < 1e-4


def test_names_without_the_body_s_prefix(build: Build) -> None:
    """GPT-2's own checkpoint was saved from the body alone."""
    raw = small("GPT2LMHeadModel")
    theirs = reference_model(raw)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in checkpoint_of(theirs).items()}
    assert "h.0.attn.c_attn.weight" in tensors
    model, _ = build(raw)
    model.load_weights(tensors.items())


def test_linear_layers_are_quantized(build: Build) -> None:
    raw = small("SmolLM3ForCausalLM", hidden_size=64, intermediate_size=128, tie_word_embeddings=False)
    tensors = checkpoint_of(reference_model(raw))
    plain, plain_context = build(raw)
    packed, packed_context = build(raw, "int8")
    assert packed.parameter_bytes() < 0.5 * plain.parameter_bytes()
    plain.load_weights(tensors.items())
    packed.load_weights(tensors.items())
    expected = run(plain, plain_context)[0]
    assert 0 < relative_error(run(packed, packed_context)[0], expected) < 0.2


def test_nothing_is_allocated_before_weights_arrive(build: Build) -> None:
    raw = small("LlamaForCausalLM", vocab_size=2**20, hidden_size=2**13, num_attention_heads=64, head_dim=128)
    model, context = build(raw, device=torch.device("meta"))
    assert model.parameter_bytes() > 2**36
    assert [layer.num_heads for layer in context.attention_layers] == [64] * 4


def test_half_precision_keeps_what_must_not_be(build: Build) -> None:
    raw = small("LlamaForCausalLM")
    tensors = checkpoint_of(reference_model(raw))
    model, context = build(raw, dtype=torch.bfloat16)
    model.load_weights(tensors.items())
    result = run(model, context)[0]
    assert result.isfinite().all()


def test_one_worker_only(build: Build) -> None:
    with pytest.raises(ModelError, match="on one worker only"):
        build(small("LlamaForCausalLM"), parallel=ParallelLayout(0, 2))


def test_it_is_taken_where_no_plugin_is_called_by_the_architecture(llmkit_registry: Registry) -> None:
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "num_blocks": 64,
        "num_threads": 1,
        "max_num_batched_tokens": 16,
    }
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0)
    prompts = [[1, 2, 3], list(range(30)), [7]]
    with LLM(overrides=small("Gemma2ForCausalLM"), registry=llmkit_registry, **settings) as llm:
        answers = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
        alone = [llm.generate(p, params, use_tqdm=False)[0].outputs[0].token_ids for p in prompts]
    chosen = next(s for s in llmkit_registry.selections if s.kind == "model")
    assert chosen.name == "transformers"
    assert chosen.reason == "no plugin is called Gemma2ForCausalLM, and it serves that"
    assert answers == alone
    assert all(len(answer) == 8 for answer in answers)
