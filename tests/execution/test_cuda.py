"""The same on a GPU: staging through pinned memory, sampling, the measured memory plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmkit.requests.message import EngineRequest
from llmkit.requests.sampling_params import SamplingParams
from llmkit.sampling.sampler import Sampler
from llmkit.scheduling.plan import AddedRow

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

PROMPT = [5, 17, 3, 3, 21, 8, 30, 11, 2, 14, 9]
MIXTURE: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 1.5, "top_k": 40},
    {"temperature": 0.9, "top_p": 0.8, "logprobs": 3},
    {"temperature": 0.9, "min_p": 0.05},
    {"temperature": 0.7, "frequency_penalty": 1.0, "repetition_penalty": 1.2},
    {"temperature": 0, "logit_bias": {7: 90.0}, "bad_words": "x", "logprobs": -1},
    {"temperature": 1.0, "allowed_token_ids": [3, 4, 5], "min_tokens": 2},
]


def sampled(device: str) -> list[list[int]]:
    vocab_size, rows = 5003, len(MIXTURE)
    buffer = np.zeros((rows, 64), dtype=np.int32)
    sampler = Sampler(buffer, vocab_size, torch.device(device))
    for slot, params in enumerate(MIXTURE):
        request = EngineRequest(
            request_id="",
            prompt_token_ids=[1],
            sampling_params=SamplingParams(**params),
            max_tokens=60,
            stop_token_ids=frozenset({3}),
            bad_words_ids=((9, 10), (7,)) if "bad_words" in params else (),
        )
        sampler.add(AddedRow(slot, request, 0, slot, [1], 1, ()))
    slots, answers = np.arange(rows, dtype=np.int32), []
    logits = torch.randn(30, rows, vocab_size, generator=torch.Generator().manual_seed(5)) * 3
    for step in range(30):
        result = sampler.sample(logits[step].to(device), slots, np.full(rows, 1 + step, dtype=np.int32))
        assert not result.failed
        buffer[:, 1 + step] = result.token_ids
        answers.append(result.token_ids.tolist())
    return answers


def test_the_gpu_draws_what_the_cpu_draws():
    assert sampled("cuda") == sampled("cpu")


@pytest.mark.parametrize("windows", [(None,), (6, None, 6)])
def test_steps(driver, windows):
    d = driver(windows, device="cuda")
    d.add(4, PROMPT, prompt_logprobs=2)
    d.add(1, PROMPT[:3])
    d.step({4: 5, 1: 3})
    d.add(6, PROMPT[::-1], temperature=0.8, seed=3)
    for work in ({1: 1, 6: 11, 4: 6}, {4: 1, 1: 1, 6: 1}, {6: 1, 4: 1}, {4: 1}):
        result = d.step(work)
        for row, slot in enumerate(work):
            d.check(slot, result.logprobs[row])


def test_a_bad_row_fails_alone(driver):
    d = driver((None,), device="cuda")
    d.model.poisoned = 39
    d.add(0, PROMPT)
    d.add(1, [4, 39])
    result = d.step({0: 11, 1: 2})
    assert list(result.failed) == [1]
    d.check(0, result.logprobs[0])


def tiny_worker(tiny_model_plugin, paged_attention_plugin):
    """A worker with a tiny model and the tests' attention, nothing loaded."""
    from llmkit.config import EngineConfig
    from llmkit.execution.setup import WorkerSetup
    from llmkit.execution.worker import Worker
    from llmkit.frontend.model_source import ModelSource
    from llmkit.registry import Registry
    from llmkit_kernels import torch_reference
    from llmkit_quantization import none

    class NoTensors:
        expect = staticmethod(lambda shapes: None)  # noqa: ARG005
        tensors = staticmethod(lambda path, config: iter(()))  # noqa: ARG005
        size_bytes = staticmethod(lambda path: None)  # noqa: ARG005

    registry = Registry.discover()
    for kind, door in (
        ("model", tiny_model_plugin),
        ("attention", paged_attention_plugin),
        ("kernels", torch_reference),
        ("quantization", none),
    ):
        registry.register(kind, "mine", door)
    config = EngineConfig.model_validate(
        {
            "model": {"dtype": "float32", "max_model_len": 96, "quantization": "mine"},
            "scheduler": {"max_num_batched_tokens": 64, "max_num_seqs": 4},
            "attention": {"backend": "mine"},
            "execution": {"device": "cuda", "kernels": "mine"},
        }
    )
    raw = {
        "architectures": ["mine"], "vocab_size": 5000, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "windows": [None, None],
    }  # fmt: skip
    source = ModelSource(Path("nowhere"), "none", NoTensors(), raw, "mine")  # type: ignore[arg-type]
    return Worker(WorkerSetup(config, source, registry))


def loaded_activations(*plugins) -> int:
    worker = tiny_worker(*plugins)
    try:
        return worker.load().memory.activations
    finally:
        worker.close()


def test_measured_memory(tiny_model_plugin, paged_attention_plugin):
    from llmkit.kv_cache.layout import KVCacheLayout

    worker = tiny_worker(tiny_model_plugin, paged_attention_plugin)
    assert worker.dry_run().memory.num_blocks == 4 * 6 + 1
    before = torch.cuda.memory_allocated()
    report = worker.load()
    # Sampling alone holds keys and a sort of the logits.
    assert report.memory.activations > 4 * 5000 * 4 * 2
    assert report.memory.weights >= 2 * 5000 * 32 * 4
    worker.allocate(KVCacheLayout(report.groups, report.memory.num_blocks, report.block_size, report.page_size))
    assert torch.cuda.memory_allocated() - before >= report.memory.weights + report.memory.cache
    worker.close()
    assert torch.cuda.memory_allocated() <= before


def test_what_a_step_leaves_behind_is_in_the_plan(tiny_model_plugin, paged_attention_plugin, monkeypatch):
    """Such as the workspace of a library, which is made when it is first needed."""
    workspaces: list[torch.Tensor] = []
    backend = type(paged_attention_plugin.llmkit_attention_backend())
    forward = backend.forward

    def forward_with_workspace(self, *arguments):
        if not workspaces:
            workspaces.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
        return forward(self, *arguments)

    before = loaded_activations(tiny_model_plugin, paged_attention_plugin)
    monkeypatch.setattr(backend, "forward", forward_with_workspace)
    after = loaded_activations(tiny_model_plugin, paged_attention_plugin)
    workspaces.clear()
    assert 64 << 20 <= after <= before + (66 << 20)


def test_steps_ahead(driver):
    """Launched before the tokens of the step before are known; kernel by kernel, as this attention waits."""
    d = driver((6, None, 6), device="cuda", launched=True)
    d.add(0, PROMPT, logprobs=None)
    d.add(1, PROMPT[::-1], logprobs=None)
    flights = [d.submit({0: 11, 1: 11}), *(d.submit({0: 1, 1: 1}) for _ in range(12))]
    for flight in flights:
        flight.land()
    for slot in (0, 1):
        tokens = d.sequences[slot].tokens
        expected = d.model.dense(tokens)[len(PROMPT) - 1 : -1].argmax(-1)
        assert expected.tolist() == tokens[len(PROMPT) :]


def write_small_model(folder: Path) -> None:
    """config.json of a model in float32 for dummy weights."""
    import json

    shape = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 9001, "hidden_size": 256,
        "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512,
        "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))


def test_graphs_and_fused_kernels_give_the_reference_s_tokens(tmp_path: Path):
    """All of the fast path beside none of it, in float32: rows that come and go, greedy and seeded."""
    from llmkit import LLM

    write_small_model(tmp_path)
    draw = np.random.default_rng(4)
    prompts = [{"prompt_token_ids": draw.integers(0, 9001, 5 + 9 * i).tolist()} for i in range(11)]
    params = [
        SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=20 + 7 * i, ignore_eos=True, top_k=-1)
        for i in range(11)
    ]
    for i, more in {
        1: {"top_p": 0.8}, 3: {"top_k": 50, "top_p": 0.95}, 5: {"top_k": 20, "logprobs": 2},
        7: {"min_p": 0.02, "top_k": 300}, 8: {"frequency_penalty": 0.7, "repetition_penalty": 1.2},
        10: {"logit_bias": {7: 3.0}, "logprobs": 0},
    }.items():  # fmt: skip
        params[i] = SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=20 + 7 * i, ignore_eos=True, **more)
    answers = {}
    for name, settings in {
        "fast": {},
        "graphs": {"async_scheduling": False},
        "reference": {"async_scheduling": False, "kernels": "torch", "attention": "torch"},
    }.items():
        llm = LLM(
            str(tmp_path), load_format="dummy", skip_tokenizer=True, device="cuda", max_num_seqs=8,
            num_blocks=400, **settings,
        )  # fmt: skip
        with llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        answers[name] = [output.outputs[0].token_ids for output in outputs]
        assert [len(output.outputs[0].logprobs or ()) for output in outputs] == [
            0 if p.logprobs is None else p.max_tokens for p in params
        ]
        assert len(set(map(tuple, answers[name]))) == len(prompts)
    assert answers["fast"] == answers["reference"]
    assert answers["graphs"] == answers["reference"]


@pytest.mark.parametrize("way", [{}, {"top_p": 0.9}, {"top_k": 20}], ids=["temperature", "top-p", "top-k"])
def test_a_seeded_answer_does_not_depend_on_its_company(tmp_path: Path, way: dict[str, Any]):
    """In float32, whose rounding no draw of these meets: alone, in a batch of 7, and among 64 drawn in other ways."""
    from llmkit import LLM

    write_small_model(tmp_path)
    draw = np.random.default_rng(6)
    prompts = [{"prompt_token_ids": draw.integers(0, 9001, 4 + i).tolist()} for i in range(64)]
    others = [{}, {"top_p": 0.8}, {"top_k": 5}, {"temperature": 0.0}, {"min_p": 0.1}, {"logprobs": 1}]
    seeded = [
        SamplingParams(**{"temperature": 0.8, "seed": i, "max_tokens": 40, "ignore_eos": True, **way}) for i in range(7)
    ]
    strange = [
        SamplingParams(**{"temperature": 0.8, "seed": i, "max_tokens": 10 + i, "ignore_eos": True, **others[i % 6]})
        for i in range(7, 64)
    ]
    with LLM(
        str(tmp_path), load_format="dummy", skip_tokenizer=True, device="cuda", max_num_seqs=64, num_blocks=1000,
        enable_prefix_caching=False,
    ) as llm:  # fmt: skip

        def answers(which: slice, params: list[SamplingParams]) -> list[list[int]]:
            return [o.outputs[0].token_ids for o in llm.generate(prompts[which], params, use_tqdm=False)]

        alone = [answers(slice(i, i + 1), seeded[i : i + 1])[0] for i in range(7)]
        assert len(set(map(tuple, alone))) == 7
        assert answers(slice(0, 7), seeded) == alone
        assert answers(slice(0, 64), seeded + strange)[:7] == alone
        assert answers(slice(63, None, -1), (seeded + strange)[::-1])[:-8:-1] == alone
