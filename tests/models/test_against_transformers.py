"""Every architecture against Hugging Face transformers on small random models, in one pass and in pieces."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from llmkit.hookspecs.attention import AttentionBackend
from llmkit.hookspecs.kernels import KernelTable
from llmkit.layers.causal_lm import CausalLM
from llmkit.layers.config import DecoderConfig
from llmkit.layers.context import ModelContext
from llmkit.testing.conformance.model_examples import checkpoint_of, reference_model
from llmkit.testing.models import ModelTrial, relative_error
from llmkit_kernels.torch_table import TorchKernels
from llmkit_quantization.none import NoQuantization

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
SLIDING = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
SMALL_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 4.5],
}
PHI3 = {"hidden_size": 96, "pad_token_id": 0, "rope_parameters": LONGROPE}
GEMMA = {"sliding_window": 9, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama multi head": ("Llama", {"num_key_value_heads": 6, "head_dim": None}),
    "llama multi query": ("Llama", {"num_key_value_heads": 1}),
    "llama biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama gelu": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama yarn": ("Llama", {"rope_parameters": YARN}),
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e4, "factor": 3.0}}),
    "llama theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral window": ("Mistral", {"sliding_window": 11}),
    "qwen2": ("Qwen2", {}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True, "sliding_window": 7}),
    "qwen2 window": ("Qwen2", SLIDING),
    "qwen3": ("Qwen3", {}),
    "qwen3 tied and biased": ("Qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3 window": ("Qwen3", {**SLIDING, "layer_types": KINDS}),
    "qwen3 moe": ("Qwen3Moe", {**SMALL_EXPERTS, "norm_topk_prob": True}),
    "qwen3 moe, some dense": ("Qwen3Moe", {**SMALL_EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": [0]}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "mixtral window": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 10}),
    "gemma3": ("Gemma3", GEMMA),
    "gemma3 scaled": (
        "Gemma3",
        {
            **GEMMA,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 2.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "phi3": ("Phi3", {"pad_token_id": 0, "sliding_window": 12}),
    "phi3 short": ("Phi3", {**PHI3, "original_max_position_embeddings": 64}),
    "phi3 long": ("Phi3", {**PHI3, "original_max_position_embeddings": 8}),
}


@dataclass
class Pair:
    """The same random model twice."""

    theirs: Any
    ours: CausalLM
    context: ModelContext


def build(family: str, changes: dict[str, Any], kernels: KernelTable, **keys: Any) -> Pair:
    name = {"Gemma3": "Gemma3TextConfig"}.get(family, f"{family}Config")
    config = getattr(transformers, name)(**{**SMALL, **changes})
    theirs = reference_model({**config.to_dict(), "architectures": [f"{family}ForCausalLM"]})
    raw = {**config.to_dict(), **keys}
    context = ModelContext(DecoderConfig.from_hf(raw), torch.float32, torch.device("cpu"), kernels, NoQuantization())
    context.max_model_len = 64 if changes.get("original_max_position_embeddings") == 64 else None
    ours: CausalLM = module_of(family).llmkit_model(context)
    ours.load_weights(checkpoint_of(theirs).items())
    return Pair(theirs, ours, context)


def module_of(family: str) -> Any:
    name = re.sub(r"(?<=\w)([A-Z])", r"_\1", family).lower()
    return importlib.import_module(f"llmkit_models.{name}")


def trial(pair: Pair, backend: AttentionBackend, page_size: int = 4) -> ModelTrial:
    return ModelTrial(pair.ours, pair.context.attention_layers, backend, page_size=page_size)


def reference(pair: Pair, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = pair.theirs(ids[None]).logits[0]
    return logits


def backend_named(name: str) -> AttentionBackend:
    backend: AttentionBackend = importlib.import_module(f"llmkit_attention.{name}").llmkit_attention_backend()
    return backend


LENGTHS = {0: 40, 1: 23, 2: 9}
SEQUENCES = {s: torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(s)) for s, n in LENGTHS.items()}
CHUNKS = [
    {0: 10, 1: 5},
    {1: 1, 0: 13, 2: 7},
    {0: 1, 1: 1, 2: 1},
    {2: 1, 0: 1, 1: 9},
    {0: 15, 1: 7},
]


@pytest.mark.parametrize("case", CASES)
def test_logits_of_transformers(case: str) -> None:
    pair = build(*CASES[case], TorchKernels())
    expected = {s: reference(pair, ids) for s, ids in SEQUENCES.items()}
    whole = trial(pair, backend_named("torch_reference"))
    pieces = trial(pair, backend_named("torch_reference"), page_size=8)
    for s, ids in SEQUENCES.items():
        assert relative_error(whole.step({s: ids})[s], expected[s]) < 1e-4
    result = pieces.run(SEQUENCES, CHUNKS)
    for s in SEQUENCES:
        assert relative_error(result[s], expected[s]) < 1e-4


@pytest.mark.parametrize("case", ["llama", "llama3", "mistral window", "qwen2 window", "qwen3", "gemma3", "mixtral"])
def test_the_cpu_plugins_give_the_same(case: str) -> None:
    kernels = importlib.import_module("llmkit_kernels.cpu").llmkit_kernels()
    pair = build(*CASES[case], kernels)
    result = trial(pair, backend_named("cpu"), page_size=16).run(SEQUENCES, CHUNKS)
    for s, ids in SEQUENCES.items():
        assert relative_error(result[s], reference(pair, ids)) < 1e-4


def test_a_sequence_does_not_depend_on_the_batch() -> None:
    pair = build(*CASES["qwen3 window"], TorchKernels())
    alone = trial(pair, backend_named("torch_reference")).step({0: SEQUENCES[0]})[0]
    crowd = trial(pair, backend_named("torch_reference")).step({1: SEQUENCES[1], 0: SEQUENCES[0], 2: SEQUENCES[2]})[0]
    torch.testing.assert_close(alone, crowd, rtol=1e-5, atol=1e-5)


def test_a_configuration_of_transformers_4_means_the_same() -> None:
    """theta at the top level and `rope_scaling`, as most checkpoints have it."""
    old: dict[str, Any] = {
        "rope_parameters": None,
        "rope_theta": 10000.0,
        "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"},
        "torch_dtype": "float32",
    }
    pair = build(*CASES["llama3"], TorchKernels(), **old)
    logits = trial(pair, backend_named("torch_reference")).step({0: SEQUENCES[0]})[0]
    assert relative_error(logits, reference(pair, SEQUENCES[0])) < 1e-4


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Mixtral", "Gemma3Text", "Phi3"])
def test_keys_that_are_missing_mean_what_they_mean_to_transformers(family: str) -> None:
    sizes = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 7}
    sizes["num_attention_heads"] = 32
    theirs = getattr(transformers, f"{family}Config")(**sizes)
    context = ModelContext(
        DecoderConfig.from_hf(sizes), torch.float32, torch.device("meta"), TorchKernels(), NoQuantization()
    )
    module_of(family.removesuffix("Text")).llmkit_model(context)
    ours = context.config
    for key in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(ours, key) == getattr(theirs, key), key
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 64 // 32)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 7
    for index, kind in enumerate(kinds):
        rope = theirs.rope_parameters.get(kind, theirs.rope_parameters)
        assert ours.rope_of_layer(index).theta == rope["rope_theta"]
    windows = [layer.sliding_window for layer in context.attention_layers]
    window = getattr(theirs, "sliding_window", None)
    assert windows == [window if kind == "sliding_attention" else None for kind in kinds]
    assert {layer.scale for layer in context.attention_layers} == {
        getattr(theirs, "query_pre_attn_scalar", ours.head_dim) ** -0.5
    }
