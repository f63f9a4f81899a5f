"""The `triton` kernels under Triton's interpreter, on the CPU: what the conformance suite does not ask. The interpreter
must be chosen before Triton is imported, so `test_triton.py` runs this file in a process of its own, and the suite
with it; by hand: TRITON_INTERPRET=1 pytest tests/attention/test_triton_interpreted.py"""

from __future__ import annotations

import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from llmkit.hookspecs.attention import AttentionBackend, AttentionLayer, AttentionQuery
from llmkit.testing.attention import TOLERANCE, AttentionTrial, shaped_layer
from llmkit.testing.paged_attention import PagedPool

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


def backend(num_processors: int = 2) -> AttentionBackend:
    """Few processors: nothing is split; many: whatever is long enough."""
    from llmkit_attention.triton_backend import TritonAttention
    from llmkit_attention.triton_tiles import Device

    return TritonAttention(Device(num_processors, 2**17))


def with_two_loops() -> AttentionBackend:
    """Keys that all queries of a block see in a loop of their own, which the tiles of float32 do not have."""
    from llmkit_attention.triton_backend import TritonAttention
    from llmkit_attention.triton_tiles import Device, Tile

    return TritonAttention(Device(2, 2**17), lambda *_: Tile(32, 16, 4, 2, phased=True))


def num_splits(run: AttentionTrial, rows: list[tuple[int, int]]) -> list[int]:
    """In how many splits each launch of a step with these rows would go."""
    pool = deepcopy(run.pool)
    plan = run.backend.plan(pool.step(rows))
    return [launch.num_splits for launch in run.backend._launches(run.layer, run.dtype, run.kv_dtype, plan)]


@pytest.mark.parametrize(
    ("window", "rows"), [(None, [(0, 12), (1, 1)]), (300, [(1, 3), (0, 1), (2, 5)]), (None, [(0, 1)])]
)
def test_long_sequences_are_split_and_combined(window: int | None, rows: list[tuple[int, int]]) -> None:
    run = AttentionTrial(backend(8), AttentionLayer(0, 2, 1, 16, 0.25, window, 4.0), 16)
    run.fill(0, 599)
    run.fill(1, 90)
    assert max(num_splits(run, rows)) > 1
    assert run.step(rows) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("window", [None, 600])
def test_uneven_rows_are_cut_into_items(window: int | None) -> None:
    """Rows of one item, of several, and one that goes another way, as it has many tokens."""
    run = AttentionTrial(backend(40), AttentionLayer(0, 2, 1, 16, 0.25, window), 16, capacity=1600)
    run.fill(3, 700)
    run.fill(1, 290)
    rows = [(0, 1), (1, 2), (2, 9), (3, 1), (4, 1)]
    plan = run.backend.plan(deepcopy(run.pool).step(rows))
    first = run.backend._launches(run.layer, run.dtype, run.kv_dtype, plan)[0]
    assert first.num_items > 0
    assert first.num_splits == 1
    assert run.step(rows) < TOLERANCE[torch.float32]


def test_more_splits_than_are_combined_at_once() -> None:
    run = AttentionTrial(backend(4000), AttentionLayer(0, 1, 1, 16, 0.25), 64)
    run.pool = PagedPool(num_pages=60, page_size=64)
    run.cache = run.pool.caches(run.backend, [run.layer], torch.float32, fill=float("nan"))[0]
    run.fill(0, 3000)
    assert num_splits(run, [(0, 1)])[0] > 16
    assert run.step([(0, 1)]) < TOLERANCE[torch.float32]


def test_more_heads_than_a_program_takes() -> None:
    run = AttentionTrial(backend(), AttentionLayer(0, 71, 1, 16, 0.25), 16)
    for rows in (((0, 3), (1, 1)), ((0, 1), (1, 2))):
        assert run.step(rows) < TOLERANCE[torch.float32]


def test_a_negative_scale() -> None:
    """The largest score is then not that of the largest product."""
    run = AttentionTrial(backend(), AttentionLayer(0, 2, 1, 16, -0.4), 16)
    assert run.step(((0, 9), (1, 1))) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("window", "cap"), [(None, None), (30, 3.0), (70, None)])
def test_keys_that_all_queries_see_have_a_loop_of_their_own(window: int | None, cap: float | None) -> None:
    for page_size in (16, 32):
        run = AttentionTrial(with_two_loops(), AttentionLayer(0, 2, 1, 16, 0.25, window, cap), page_size)
        run.fill(1, 75)
        for rows in (((0, 35), (1, 20)), ((1, 40),)):
            assert run.step(rows) < TOLERANCE[torch.float32]


def test_padding_is_zero() -> None:
    layer, tried = shaped_layer("multi query"), backend()
    pool = PagedPool(num_pages=8, page_size=16)
    cache = pool.caches(tried, [layer], torch.float32)[0]
    key = torch.ones(8, 1, 32)
    output = tried.forward(layer, torch.ones(8, 8, 32), key, 2 * key, cache, tried.plan(pool.step([(0, 6)])))
    assert (output[:6] == 2).all()
    assert not output[6:].any()


def test_interpreted_it_is_taken_only_when_named() -> None:
    from llmkit.registry import Registry, detect_environment

    query = AttentionQuery("cpu", None, torch.float32, torch.float32, 4, 2, 16)
    registry, environment = Registry.discover(), detect_environment()
    for choice in ("auto", "triton"):
        registry.create("attention", choice, environment, judge=lambda tried: tried.support(query))
    first, second = registry.selections
    assert first.name != "triton"
    assert second.name == "triton"


@pytest.mark.model
def test_the_model_answers_as_the_reference(smollm2_gguf: Path, golden: list[dict[str, Any]]) -> None:
    """The first tokens of a golden answer: a prompt of five tokens, then a decode step, through thirty layers."""
    from llmkit import LLM, SamplingParams

    settings = {"attention.backend": "triton", "execution.kernels": "torch", "num_threads": 1}
    with LLM(smollm2_gguf, dtype="float32", max_model_len=64, num_blocks=8, **settings) as llm:
        answer = llm.generate(golden[0]["prompt_token_ids"], SamplingParams(temperature=0, max_tokens=2))[0].outputs[0]
    assert answer.token_ids == golden[0]["output_token_ids"][:2]
