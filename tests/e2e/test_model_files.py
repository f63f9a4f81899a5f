"""What the model's files say: tied embeddings, row order, types. The folder is the GGUF's twin, dequantised."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmkit import ModelError, SamplingParams

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def with_head(smollm2_folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """The folder with another `tie_word_embeddings` and, in a shard of its own, a head."""

    def make(*, tie: bool, head: Callable[[torch.Tensor], torch.Tensor] | None) -> Path:
        for file in smollm2_folder.iterdir():
            (tmp_path / file.name).symlink_to(file)
        config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
        (tmp_path / "config.json").unlink()
        (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tie}), encoding="utf-8")
        if head is not None:
            whole = tmp_path / "body.safetensors"
            (tmp_path / "model.safetensors").rename(whole)  # beside it, an index would not count
            tensors = load_file(whole)
            places = dict.fromkeys(tensors, whole.name) | {"lm_head.weight": "head.safetensors"}
            save_file({"lm_head.weight": head(tensors[EMBEDDING]).contiguous()}, tmp_path / "head.safetensors")
            index = {"metadata": {}, "weight_map": places}
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("tie", "head"),
    [
        pytest.param(True, None, id="a: as is"),
        pytest.param(True, torch.zeros_like, id="b: tied, and a head of zeros in the file"),
        pytest.param(False, lambda embedding: embedding * 1, id="d: a head of its own"),
    ],
)
def test_tied_embeddings(with_head, make_llm, facts, ids, tie, head):
    """B84."""
    llm = make_llm(with_head(tie=tie, head=head), max_model_len=64, num_blocks=16)
    assert ids(llm, facts.g1, temperature=0, max_tokens=12) == facts.g1_ids


def test_a_head_that_is_missing_is_named(with_head, make_llm):
    """B84 c."""
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        make_llm(with_head(tie=False, head=None), max_model_len=64, num_blocks=16)


def test_the_gguf_file_and_its_folder_answer_alike(llm, smollm2_folder, make_llm, facts, ids):
    """B86: row order of queries and keys."""
    folder = make_llm(smollm2_folder)
    for prompt, expected in ((facts.g1, facts.g1_ids), (facts.g2, facts.g2_ids), (facts.g3, facts.g3_ids)):
        for engine in (llm, folder):
            assert ids(engine, prompt, temperature=0, max_tokens=len(expected)) == expected
    for engine in (llm, folder):
        answer = engine.chat(facts.g4, SamplingParams(temperature=0, max_tokens=20))[0].outputs[0]
        assert answer.token_ids == facts.g4_ids


DEEP = os.environ.get("LLMKIT_DEEP_TESTS") == "1"
FEWER_TOKENS = 300 if DEEP else 100
BFLOAT16_TOKENS = 300 if DEEP else 40  # a processor without bfloat16 arithmetic emulates it, many times slower


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "tokens"),
    [
        ("auto", "auto", 300),
        ("float32", "bfloat16", FEWER_TOKENS),
        ("bfloat16", "auto", BFLOAT16_TOKENS),
        ("float16", "float32", FEWER_TOKENS),
        ("auto", "fp8", 40),
    ],
)
def test_types_hold_for_a_long_answer(make_llm, facts, dtype, kv_dtype, tokens):
    """B88: 300 tokens with finite log-probabilities; cache and weights may differ in type. By default only the types
    that are chosen without being asked for answer at full length."""
    llm = make_llm(dtype=dtype, num_blocks=32, **{"kv_cache.dtype": kv_dtype})
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=1)
    answer = llm.generate(facts.g1, params)[0].outputs[0]
    assert len(answer.token_ids) == tokens
    assert all(math.isfinite(value) for entry in answer.logprobs for value in entry.logprobs)
    assert len(set(answer.token_ids)) > 5
    if llm.config.model.dtype == llm.config.kv_cache.dtype == "float32":
        assert answer.token_ids[:12] == facts.g1_ids
    else:
        assert answer.token_ids[:2] == facts.g1_ids[:2]
