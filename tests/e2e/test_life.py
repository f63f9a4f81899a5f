"""Starting, refusing to start, closing."""

from __future__ import annotations

import gc
import time

import psutil
import pytest
import torch

from llmkit import ConfigError, EngineClosedError, LlmkitError, SamplingParams


def test_close_frees_the_memory(make_llm, facts):
    process = psutil.Process()
    llm = make_llm(num_blocks=200)
    llm.generate(facts.g1, SamplingParams(max_tokens=2))
    count, full = len(_embeddings()), process.memory_info().rss
    llm.close()
    llm.close()
    assert len(_embeddings()) < count
    assert full - process.memory_info().rss > 450 * 2**20
    for use in (llm.stats, llm.reset_prefix_cache, lambda: llm.generate("x"), lambda: next(llm.stream("x"))):
        with pytest.raises(EngineClosedError):
            use()


def _embeddings() -> list[torch.Tensor]:
    """All tensors of the shape of the model's embedding that are alive."""
    found = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    return [tensor for tensor in found if tensor.shape == (49_152, 576)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_model_len": 9000}, "8192"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_model_len": -5}, "max_model_len"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 17}, "block"),
        ({"block_size": -1}, "block_size"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"cpu_memory_utilization": 0}, "cpu_memory_utilization"),
        ({"cpu_memory_utilization": 1.5}, "cpu_memory_utilization"),
        ({"device": "cuda:99"}, "cuda"),
        ({"device": "quantum"}, "quantum"),
        ({"connector.name": "disk"}, "connector"),
        ({"structured.backend": "regexes"}, "structured"),
        ({"scheduler.policy": "nonsense"}, "nonsense"),
        ({"attention.backend": "nonsense"}, "nonsense"),
        ({"chat_template": "{% if %}"}, "chat_template"),
        ({"chat_template": "/no/such/file"}, "chat_template"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 512}, "max_num_batched_tokens"),
        ({"async_scheduling": True}, "async_scheduling"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_weights_are_read(make_llm, monkeypatch, changes, words):
    """B82."""
    from llmkit_weights.gguf_format import GgufFormat

    def no_weights(*_):
        pytest.fail("weights were read")

    monkeypatch.setattr(GgufFormat, "tensors", no_weights)
    start = time.process_time()
    with pytest.raises(LlmkitError) as caught:
        make_llm(**changes)
    assert words in str(caught.value)
    assert time.process_time() - start < 10


def test_a_missing_model(make_llm, tmp_path):
    with pytest.raises(LlmkitError, match="nowhere"):
        make_llm(tmp_path / "nowhere")


def test_config_and_settings_exclude_each_other(llm):
    from llmkit import LLM

    with pytest.raises(ConfigError, match="not both"):
        LLM("x", config=llm.config)


def test_a_dry_run_says_what_would_run(llm, smollm2_gguf, settings, monkeypatch):
    from llmkit.config import load_config
    from llmkit.engine.factory import plan_engine
    from llmkit_weights.gguf_format import GgufFormat

    monkeypatch.setattr(GgufFormat, "tensors", lambda *_: pytest.fail("weights were read"))
    plan = plan_engine(load_config(flags={"model": str(smollm2_gguf)} | settings).config)
    engine = llm.engine
    assert plan.layout == engine.layout
    assert plan.config == engine.config
    assert plan.report.memory.weights == pytest.approx(engine.report.memory.weights, rel=0.01)
    chosen = {selection.kind: selection.name for selection in plan.registry.selections}
    running = {selection.kind: selection.name for selection in engine.prepared.registry.selections}
    running.pop("structured", None)  # chosen by the first request with a grammar, which may have been another test's
    assert chosen == running
    assert {"scheduler", "attention", "executor", "kernels", "weights", "model"} <= set(chosen)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_types(make_llm, facts, dtype):
    """B88: finite, and the same beginning as in float32."""
    llm = make_llm(dtype=dtype)
    answer = llm.generate(facts.g1, SamplingParams(temperature=0, max_tokens=12, logprobs=1))[0].outputs[0]
    assert all(-50 < entry.logprobs[0] <= 0 for entry in answer.logprobs)
    assert answer.token_ids[:2] == facts.g1_ids[:2]
