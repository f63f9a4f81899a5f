"""Attention backends against attention by definition, over shapes, page sizes, types and masks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from llmkit.hookspecs import Environment
from llmkit.hookspecs.attention import AttentionBackend, AttentionBatch, AttentionLayer, AttentionQuery
from llmkit.testing.attention import (
    SHAPES,
    STEPS,
    TOLERANCE,
    AttentionTrial,
    check_attention_backend,
    shaped_layer,
    single_threaded,
)

FRONT_DOORS = ["llmkit_attention.torch_reference", "llmkit_attention.cpu"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with single_threaded():
        yield


@pytest.fixture(params=FRONT_DOORS)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    built: AttentionBackend = importlib.import_module(request.param).llmkit_attention_backend()
    return built


@pytest.mark.parametrize("page_size", [16, 4, 32])
@pytest.mark.parametrize("name", SHAPES)
def test_agrees_with_the_definition(backend: AttentionBackend, name: str, page_size: int) -> None:
    run = AttentionTrial(backend, shaped_layer(name), page_size)
    for rows in STEPS:
        assert run.step(rows) < TOLERANCE[torch.float32]


def test_the_conformance_suite_passes(backend: AttentionBackend) -> None:
    assert check_attention_backend(backend) == 2 * len(SHAPES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_and_values_too_large_for_an_8_bit_cache(dtype: torch.dtype) -> None:
    """They become its largest number; NaN stays, so that a faulty row is still seen."""
    backend = importlib.import_module("llmkit_attention.torch_reference").llmkit_attention_backend()
    layer = AttentionLayer(0, 1, 1, 16, 0.25)
    run = AttentionTrial(backend, layer, 16, dtype, torch.float8_e4m3fn)
    key = torch.ones(4, 1, 16, dtype=dtype)
    key[:, 0, :5] = torch.tensor([500.0, -1e4, float("inf"), 448.0, float("nan")], dtype=dtype)
    backend.forward(layer, torch.ones_like(key), key, 2 * key, run.cache, backend.plan(run.pool.step([(0, 4)])))
    page = run.pool.tables[0][0]
    for part in run.cache[page, :, 0, 0]:
        assert part[:4].float().tolist() == [448, -448, 448, 448]
        assert part[4].isnan()


@pytest.mark.parametrize("fault", ["drops the window", "forgets the cap", "reads one key too many", "wrong type"])
def test_the_conformance_suite_sees_a_fault(fault: str) -> None:
    backend = importlib.import_module("llmkit_attention.torch_reference").llmkit_attention_backend()
    forward, plan = backend.forward, backend.plan

    def faulty(layer: AttentionLayer, *arguments: Any) -> torch.Tensor:
        if fault == "drops the window":
            layer = replace(layer, sliding_window=None)
        if fault == "forgets the cap":
            layer = replace(layer, soft_cap=None)
        output: torch.Tensor = forward(layer, *arguments)
        return output.double() if fault == "wrong type" else output

    def longer(batch: AttentionBatch) -> Any:
        if fault == "reads one key too many":
            batch = replace(batch, seq_lens=batch.seq_lens + 1, seq_lens_np=batch.seq_lens_np + 1)
        return plan(batch)

    backend.forward, backend.plan = faulty, longer
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        check_attention_backend(backend, dtypes=[torch.float32])


def query_of(**changes: Any) -> AttentionQuery:
    plain: dict[str, Any] = {
        "device_type": "cpu",
        "compute_capability": None,
        "dtype": torch.float32,
        "kv_dtype": torch.float32,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_size": 64,
    }
    return AttentionQuery(**(plain | changes))


def test_both_take_an_ordinary_layer(backend: AttentionBackend) -> None:
    assert backend.support(query_of()).reasons == ()
    assert backend.support(query_of(dtype=torch.bfloat16, sliding_window=5, soft_cap=1.0)).reasons == ()


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"device_type": "cuda"}, "cuda"),
        ({"head_size": 72}, "head size 72"),
        ({"kv_dtype": torch.float64}, "float64"),
        ({"num_heads": 10}, "10 query heads"),
    ],
)
def test_the_cpu_backend_says_what_it_cannot_do(changes: dict[str, Any], part: str) -> None:
    backend = importlib.import_module("llmkit_attention.cpu").llmkit_attention_backend()
    (reason,) = backend.support(query_of(**changes)).reasons
    assert part in reason


def test_the_reference_refuses_hardly_anything() -> None:
    backend = importlib.import_module("llmkit_attention.torch_reference").llmkit_attention_backend()
    assert backend.support(query_of(head_size=7, dtype=torch.float64, device_type="cuda")).reasons == ()
    assert "int8" in backend.support(query_of(kv_dtype=torch.int8)).reasons[0]
    assert "10 query heads" in backend.support(query_of(num_heads=10)).reasons[0]


def test_the_cpu_backend_wins_where_it_works() -> None:
    modules = {name: importlib.import_module(name) for name in FRONT_DOORS}
    torch_door, cpu_door = modules.values()
    assert cpu_door.info.rank > torch_door.info.rank
    problems: Callable[[Environment], list[str]] = cpu_door.llmkit_problems
    assert problems(Environment(device_type="cpu")) == []
    assert any("needs the CPU" in problem for problem in problems(Environment(device_type="cuda")))
