"""An engine that a fork has inherited says so, and does not wait for threads that the fork does not have."""

from __future__ import annotations

import os

import pytest

from llmkit import LLM, SamplingParams
from llmkit.errors import EngineError

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def test_an_inherited_engine_is_refused(monkeypatch):
    params = SamplingParams(max_tokens=1)
    with LLM(load_format="dummy", overrides=TINY, num_blocks=8) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            with pytest.raises(EngineError, match="of which this one is a fork"):
                llm.generate([[1, 2]], params, use_tqdm=False)
            with pytest.raises(EngineError, match="spawn"):
                next(llm.stream([1, 2], params))
        assert llm.generate([[1, 2]], params, use_tqdm=False)[0].finished
