"""Greedy answers of the whole engine are what the model says when it is run by hand over the same tokens."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from llmkit import LLM, SamplingParams
from llmkit.registry import Registry, detect_environment
from llmkit.testing.conformance.model_examples import context_for, shrunk_config
from llmkit.testing.models import ModelTrial
from llmkit_attention.torch_backend import TorchAttention
from llmkit_weights.dummy import DummyFormat

PROMPTS = [[5, 9, 2, 7], list(range(1, 31)), [11]]


CASES = [("Gemma3ForCausalLM", "auto"), ("MixtralForCausalLM", "auto"), ("Olmo2ForCausalLM", "transformers")]
if os.environ.get("LLMKIT_DEEP_TESTS"):
    CASES += [("Phi3ForCausalLM", "auto"), ("Qwen3MoeForCausalLM", "auto"), ("LlamaForCausalLM", "transformers")]


@pytest.mark.parametrize(("architecture", "implementation"), CASES)
def test_every_token_is_the_likeliest(architecture: str, implementation: str, llmkit_registry: Registry) -> None:
    raw = shrunk_config(architecture)
    assert raw is not None
    raw |= {"initializer_range": 0.3, "head_dim": 16}
    settings = {"load_format": "dummy", "dtype": "float32", "num_blocks": 64, "num_threads": 1}
    chunks = {"max_num_batched_tokens": 16}
    with LLM(overrides=raw, implementation=implementation, registry=llmkit_registry, **settings, **chunks) as llm:
        params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0)
        answers = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)]
        chosen = next(s.name for s in llm.engine.prepared.registry.selections if s.kind == "model")
    assert chosen == (architecture if implementation == "auto" else implementation)

    plugin = llmkit_registry.load("model", chosen)
    context = context_for(raw, plugin, llmkit_registry, detect_environment("cpu"))
    model = llmkit_registry.build(plugin, {"context": context})
    weights = DummyFormat(0)
    weights.expect(model.weight_shapes())
    model.load_weights(weights.tensors(Path(), raw))
    trial = ModelTrial(model, context.attention_layers, TorchAttention())
    for number, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        ids = torch.tensor([*prompt, *answer])
        logits = trial.step({number: ids})[number][len(prompt) - 1 : -1]
        best = logits.max(dim=-1).values
        told = logits.gather(1, ids[len(prompt) :, None])[:, 0]
        assert ((best - told) < 1e-4 * best.abs()).all()
