"""The worker with a registry into which a tiny model and its attention were registered from Python."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmkit.config import EngineConfig
from llmkit.errors import ConfigError, EngineClosedError, OutOfMemoryError, PluginError
from llmkit.execution import ready_memory
from llmkit.execution.building import attention_queries, choose_block_size, judge_of
from llmkit.execution.measuring import HostMemory, host_memory, host_use
from llmkit.execution.setup import WorkerSetup
from llmkit.execution.worker import Worker
from llmkit.frontend.model_source import ModelSource
from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.hookspecs.attention import AttentionLayer, Support
from llmkit.kv_cache.layout import KVCacheLayout
from llmkit.layers.context import ModelContext
from llmkit.registry import Registry, detect_environment
from llmkit.requests.message import EngineRequest
from llmkit.requests.sampling_params import SamplingParams
from llmkit.scheduling.plan import AddedRow, StepPlan

HF_CONFIG = {
    "architectures": ["TinyForTests"],
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "windows": [6, None, 6],
}


class Tensors:
    """A weights format with three tensors."""

    def expect(self, shapes: dict[str, tuple[int, ...]]) -> None:
        assert shapes == {}  # the tiny model has weights of its own

    def tensors(self, path: Path, config: dict[str, Any]):  # noqa: ARG002
        yield from ((f"t{i}", torch.zeros(10)) for i in range(3))

    def size_bytes(self, path: Path) -> int | None:  # noqa: ARG002
        return 120


@pytest.fixture
def make_setup(tiny_model_plugin, paged_attention_plugin) -> Callable[..., WorkerSetup]:
    def make(*, hf: dict[str, Any] | None = None, progress: Any = None, **sections: dict[str, Any]) -> WorkerSetup:
        registry = Registry.discover()
        registry.register("model", "TinyForTests", tiny_model_plugin)
        registry.register("attention", "plain", paged_attention_plugin)
        defaults: dict[str, dict[str, Any]] = {
            "model": {"dtype": "float32", "max_model_len": 96, "quantization": "none"},
            "scheduler": {"max_num_batched_tokens": 64, "max_num_seqs": 4},
            "attention": {"backend": "plain"},
            "kv_cache": {"dtype": "float32", "block_size": 4},
            "execution": {"device": "cpu", "kernels": "torch", "num_threads": torch.get_num_threads()},
        }
        for name, values in sections.items():
            defaults[name] |= values
        raw = HF_CONFIG | (hf or {})
        source = ModelSource(Path("nowhere"), "tensors", Tensors(), raw, raw["architectures"][0])  # type: ignore[arg-type]
        return WorkerSetup(EngineConfig.model_validate(defaults), source, registry, progress=progress)

    return make


def one_step(prompt: list[int]) -> StepPlan:
    request = EngineRequest(
        request_id="a", prompt_token_ids=prompt, sampling_params=SamplingParams(temperature=0), max_tokens=1
    )
    blocks = ([1, 2, 3], [4, 5, 6], [7, 8, 9])
    return StepPlan(
        0,
        np.array([0], dtype=np.int32),
        np.array([0], dtype=np.int32),
        np.array([len(prompt)], dtype=np.int32),
        samples=np.array([True]),
        added=[AddedRow(0, request, 0, 0, prompt, len(prompt), blocks)],
    )


def layout_of(report: Any) -> KVCacheLayout:
    return KVCacheLayout(report.groups, report.memory.num_blocks, report.block_size, report.page_size)


def test_load_allocate_execute_close(make_setup):
    seen: list[tuple[int, int | None]] = []
    worker = Worker(make_setup(progress=lambda done, total: seen.append((done, total))))
    report = worker.load()
    assert seen == [(0, 120), (40, 120), (80, 120), (120, 120)]
    assert (report.block_size, report.page_size) == (4, 4)
    assert [group.layers for group in report.groups] == [(0,), (2,), (1,)]
    assert worker._built is not None
    model = worker._built.model
    assert model.loaded == ["t0", "t1", "t2"]
    assert report.memory.weights == model.parameter_bytes()
    assert report.memory.block_bytes == 4 * 2 * 2 * 8 * 4
    # A sliding-window group needs its window and a step, not the whole sequence.
    assert report.memory.num_blocks == 4 * (24 + 2 * 19) + 1
    worker.allocate(layout_of(report))
    prompt = [3, 1, 4, 1, 5, 9]
    assert worker.execute(one_step(prompt)).token_ids.tolist() == [int(model.dense(prompt)[-1].argmax())]
    gone = weakref.ref(model)
    del model
    worker.close()
    worker.close()
    gc.collect()
    assert gone() is None
    with pytest.raises(EngineClosedError):
        worker.execute(one_step(prompt))


def test_an_8_bit_cache_has_four_times_the_blocks_of_float32(make_setup):
    plans = {
        dtype: Worker(make_setup(kv_cache={"dtype": dtype, "memory_gib": 2**-15})).dry_run().memory
        for dtype in ("float32", "bfloat16", "fp8")
    }
    assert plans["fp8"].block_bytes * 4 == plans["bfloat16"].block_bytes * 2 == plans["float32"].block_bytes
    assert plans["fp8"].num_blocks == 2 * plans["bfloat16"].num_blocks == 4 * plans["float32"].num_blocks > 4


def test_what_the_attention_backend_keeps_is_planned_for(make_setup, monkeypatch):
    before = Worker(make_setup()).dry_run().memory
    setup = make_setup()
    backend = setup.registry.create("attention", "plain", detect_environment("cpu"))
    monkeypatch.setattr(type(backend), "workspace_bytes", lambda _: 5 << 20)
    after = Worker(setup).dry_run().memory
    assert after.activations == before.activations + (5 << 20)


def test_dry_run_reads_nothing(make_setup):
    setup = make_setup()
    setup.source.format.tensors = None  # type: ignore[assignment]
    worker = Worker(setup)
    report = worker.dry_run()
    assert report.memory.num_blocks == 4 * (24 + 2 * 19) + 1
    assert "The KV cache gets 249 blocks" in report.memory.describe()
    assert {s.kind: s.name for s in setup.registry.selections} == {
        "kernels": "torch", "quantization": "none", "model": "TinyForTests", "attention": "plain",
    }  # fmt: skip
    worker.close()


def test_threads_are_the_configured_ones_while_the_worker_lives(make_setup):
    before = torch.get_num_threads()
    worker = Worker(make_setup(execution={"num_threads": before + 1}))
    worker.load()
    assert torch.get_num_threads() == before + 1
    worker.close()
    assert torch.get_num_threads() == before


class LargeHeads:
    """Front door of a model with one attention layer that the tests' attention cannot serve."""

    info = PluginInfo(summary="a model with large heads")

    @staticmethod
    @hookimpl
    def llmkit_model(context: ModelContext) -> object:
        context.attention_layers.append(AttentionLayer(0, 4, 2, 128, 1.0))
        return torch.nn.Identity()


def test_an_attention_plugin_that_cannot_serve_the_model_is_an_error(make_setup):
    setup = make_setup(hf={"architectures": ["LargeHeads"]})
    setup.registry.register("model", "LargeHeads", LargeHeads)
    with pytest.raises(PluginError, match="head size 128 is above 64"):
        Worker(setup).load()


def test_unknown_architecture_is_an_error(make_setup):
    with pytest.raises(PluginError, match="Nonesuch"):
        Worker(make_setup(hf={"architectures": ["Nonesuch"]})).load()


def test_a_cache_that_does_not_fit_is_explained(make_setup):
    with pytest.raises(OutOfMemoryError, match="memory_gib asks for"):
        Worker(make_setup(kv_cache={"memory_gib": 1e6})).dry_run()


def test_one_query_for_each_kind_of_layer():
    layers = [AttentionLayer(i, 4, 2, 8, 1.0, sliding_window=6 if i % 2 else None) for i in range(6)]
    queries = attention_queries(layers, "cpu", None, torch.float32, torch.bfloat16)
    assert [(q.sliding_window, q.kv_dtype) for q in queries] == [(None, torch.bfloat16), (6, torch.bfloat16)]


def test_a_backend_is_as_good_as_for_the_worst_layer():
    class Backend:
        def support(self, query):
            return Support(5) if query.sliding_window is None else Support(2, ("no windows",))

    layers = [AttentionLayer(i, 4, 2, 8, 1.0, sliding_window=6 if i else None) for i in range(3)]
    queries = attention_queries(layers, "cpu", None, torch.float32, torch.float32)
    assert judge_of(queries)(Backend()) == Support(2, ("no windows",))
    assert judge_of(queries[:1])(Backend()) == Support(5)


@pytest.mark.parametrize(
    ("pages", "wanted", "chosen"),
    [((16, 32), None, (16, 16)), ((1, 8, 64), None, (16, 8)), ((64, 128), None, (64, 64)), ((16, 32), 96, (96, 32))],
)
def test_block_and_page_size(pages, wanted, chosen):
    assert choose_block_size(pages, wanted) == chosen


def test_block_size_that_no_page_divides():
    with pytest.raises(ConfigError, match=r"block_size must be a multiple of .*16, 32.* got 24"):
        choose_block_size((16, 32), 24)


def test_host_memory_is_plausible():
    memory = host_memory()
    assert 0 < memory.free <= memory.total


def test_share_of_the_free_memory_on_the_cpu():
    config = EngineConfig.model_validate({"kv_cache": {"cpu_memory_utilization": 0.5}})
    use = host_use(config, HostMemory(total=1000, free=600), weights=100, activations=100)
    assert use.other == 400
    assert use.usable == 400 + 200 + 200
    assert use.free == 400
    full = host_use(config, HostMemory(total=1000, free=150), weights=100, activations=100)
    assert full.usable - full.weights - full.activations - full.other < 0


def is_resident(address: int) -> bool:
    state = ctypes.create_string_buffer(1)
    page = address // mmap.PAGESIZE * mmap.PAGESIZE
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(page), ctypes.c_size_t(1), state) == 0
    return bool(state.raw[0] & 1)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the state of pages")
@pytest.mark.parametrize("share", [1e6, 0])
def test_the_first_blocks_are_committed_as_far_as_the_weights_allow(make_setup, monkeypatch, share):
    monkeypatch.setattr(ready_memory, "SHARE", share)
    worker = Worker(make_setup())
    report = worker.load()
    before = set(threading.enumerate())
    worker.allocate(layout_of(report))
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert worker._runner is not None
    ranges = worker._runner.kv.first_blocks(64 // 4)  # the token budget
    assert ranges
    for address, nbytes in ranges:
        assert nbytes >= 17 * report.memory.block_bytes // len(ranges)
        assert is_resident(address + nbytes - 1) == (share > 0)
    worker.close()


def test_a_start_does_without_the_thread_that_commits_memory(make_setup, monkeypatch):
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    worker = Worker(make_setup())
    report = worker.load()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    worker.allocate(layout_of(report))
    assert worker.execute(one_step([1, 2, 3])).token_ids.shape == (1,)
    worker.close()
