"""Attention backends against attention by definition, over shapes, page sizes, types and masks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from llmkit.hookspecs import Environment
from llmkit.hookspecs.attention import AttentionBackend, AttentionBatch, AttentionLayer, AttentionQuery
from llmkit.testing.attention import SHAPES, STEPS, TOLERANCE, AttentionTrial, check_attention_backend, shaped_layer
from llmkit.testing.paged_attention import PagedPool

FRONT_DOORS = ["llmkit_attention.torch_reference", "llmkit_attention.cpu"]


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


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["grouped", "window over pages"])
def test_types_of_model_and_cache(
    backend: AttentionBackend, name: str, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    run = AttentionTrial(backend, shaped_layer(name), 16, dtype, kv_dtype)
    for rows in STEPS:
        assert run.step(rows) < TOLERANCE[dtype]


def test_the_conformance_suite_passes(backend: AttentionBackend) -> None:
    assert check_attention_backend(backend) == 2 * len(SHAPES)


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


def test_a_chunk_longer_than_any_tile(backend: AttentionBackend) -> None:
    run = AttentionTrial(backend, AttentionLayer(0, 3, 1, 16, 0.3, 100, None), 16)
    assert run.step([(0, 300), (1, 270)]) < TOLERANCE[torch.float32]
    assert run.step([(0, 1), (1, 290)]) < TOLERANCE[torch.float32]


def test_negative_slots_are_not_written(backend: AttentionBackend) -> None:
    layer = shaped_layer("grouped")
    pool = PagedPool(num_pages=8, page_size=16)
    cache = pool.caches(backend, [layer], torch.float32)[0]
    batch = pool.step([(0, 6)])
    batch.slot_mapping[2:4] = -1
    key = torch.ones(6, 3, 64)
    backend.forward(layer, torch.ones(6, 9, 64), key, 2 * key, cache, backend.plan(batch))
    page = cache[pool.tables[0][0]]
    assert page[0].amax(dim=(0, 2))[:6].tolist() == [1, 1, 0, 0, 1, 1]
    assert page[1].amax(dim=(0, 2))[:6].tolist() == [2, 2, 0, 0, 2, 2]
    cache[pool.tables[0][0]] = 0
    assert not cache.any()


def test_pages_that_left_the_window_do_not_matter(backend: AttentionBackend) -> None:
    """The table has the null page there, and that holds anything finite."""
    layer = AttentionLayer(0, 4, 2, 16, 0.25, sliding_window=20)
    run = AttentionTrial(backend, layer, 16)
    run.step([(0, 70)])
    run.cache[0] = 1e30  # unwritten pages hold NaN here, the null page never does
    run.pool.tables[0][:3] = [0, 0, 0]  # positions 0..47; the next query, at 70, sees 51..70
    assert run.step([(0, 1)]) < TOLERANCE[torch.float32]
    assert run.step([(0, 9)]) < TOLERANCE[torch.float32]


def test_a_row_does_not_depend_on_its_neighbours(backend: AttentionBackend) -> None:
    layer = shaped_layer("grouped")
    alone = AttentionTrial(backend, layer, 16)
    crowd = AttentionTrial(backend, layer, 16)
    query, key, value = (torch.randn(21, heads, 64) for heads in (9, 3, 3))
    first = backend.forward(layer, query, key, value, alone.cache, backend.plan(alone.pool.step([(7, 21)])))
    batch = crowd.pool.step([(1, 40), (7, 21), (2, 1)])
    both = [torch.cat((crowd.draw(40, x.shape[1]), x, crowd.draw(1, x.shape[1]))) for x in (query, key, value)]
    second = backend.forward(layer, *both, crowd.cache, backend.plan(batch))
    torch.testing.assert_close(second[40:61], first, rtol=1e-5, atol=1e-6)


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


def test_the_reference_refuses_integers_only() -> None:
    backend = importlib.import_module("llmkit_attention.torch_reference").llmkit_attention_backend()
    assert backend.support(query_of(head_size=7, dtype=torch.float64, device_type="cuda")).reasons == ()
    assert "int8" in backend.support(query_of(kv_dtype=torch.int8)).reasons[0]


def test_the_cpu_backend_wins_where_it_works() -> None:
    modules = {name: importlib.import_module(name) for name in FRONT_DOORS}
    torch_door, cpu_door = modules.values()
    assert cpu_door.info.rank > torch_door.info.rank
    problems: Callable[[Environment], list[str]] = cpu_door.llmkit_problems
    assert problems(Environment(device_type="cpu")) == []
    assert any("needs the CPU" in problem for problem in problems(Environment(device_type="cuda")))
