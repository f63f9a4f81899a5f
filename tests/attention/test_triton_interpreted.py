"""The `triton` kernels under Triton's interpreter, on the CPU: what the conformance suite does not ask. The interpreter
must be chosen before Triton is imported, so `test_triton.py` runs this file in a process of its own, and the suite
with it; by hand: TRITON_INTERPRET=1 pytest tests/attention/test_triton_interpreted.py"""

from __future__ import annotations

import os
from copy import deepcopy
from dataclasses import replace
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


@pytest.mark.parametrize(
    ("num_processors", "window", "cap", "page_size"), [(2, None, None, 16), (20, None, 3.0, 64), (2, 200, None, 32)]
)
def test_shared_prefixes_beside_other_rows(
    num_processors: int, window: int | None, cap: float | None, page_size: int
) -> None:
    """Groups of more rows than a tile has and of fewer, of which one row is much longer than the others, so that keys
    of its own are cut into items; then a row of several tokens and one with a long way of its own beside them."""
    run = AttentionTrial(
        backend(num_processors), AttentionLayer(0, 4, 2, 16, 0.25, window, cap), page_size, capacity=4000
    )
    run.fill(0, 300)
    run.fill(1, 140)
    run.fork(0, range(20, 29), 256)
    run.fork(1, (30, 31, 32), 128)
    run.fill(21, 500)
    rows = [(sequence, 1) for sequence in (0, 30, *range(20, 29), 31, 1, 32, 33)]
    plan = planned(run, rows)
    assert (run.backend._prefix(run.layer, run.dtype, run.kv_dtype, plan) is None) == bool(window)
    launch = run.backend._launches(run.layer, run.dtype, run.kv_dtype, plan)[0]
    assert bool(launch.num_items) == (num_processors == 20)
    assert run.step(rows) < TOLERANCE[torch.float32]
    assert run.step([*rows[3:7], (40, 7), (41, 2), *rows[8:]]) < TOLERANCE[torch.float32]


def planned(run: AttentionTrial, rows: list[tuple[int, int]]) -> Any:
    """The plan of a step with these rows."""
    tried = deepcopy(run)
    return tried.backend.plan(tried.batch(rows))


def test_more_groups_than_are_looked_at_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And more tiles than programs fill the GPU: nothing is split."""
    from llmkit_attention import triton_prefix

    monkeypatch.setattr(triton_prefix, "GROUPS", triton_prefix.tl.constexpr(2))
    run = AttentionTrial(backend(2), AttentionLayer(0, 2, 1, 16, 0.25), 16, capacity=2000)
    rows = []
    for group in range(5):
        run.fill(10 * group, 128 * (1 + group % 2) + 3)
        run.fork(10 * group, range(10 * group + 1, 10 * group + 4), 128 * (1 + group % 2))
        rows += [(10 * group + i, 1) for i in range(4)]
    prefix = run.backend._prefix(run.layer, run.dtype, run.kv_dtype, planned(run, rows))
    assert prefix is not None
    assert int((prefix.prefixes.group_starts.diff() > 0).sum()) == 5
    assert run.step(rows[::2] + rows[1::2]) < TOLERANCE[torch.float32]


def test_a_plan_follows_what_rows_share() -> None:
    """As in a captured step: planned once, the tensors then tell of other groups, and of none."""
    run = AttentionTrial(backend(8), AttentionLayer(0, 2, 1, 16, 0.25), 16, capacity=2000)
    run.fill(0, 400)
    run.fork(0, range(1, 5), 384)
    run.fork(0, range(5, 10), 128)
    batch = run.batch([(sequence, 1) for sequence in (0, 1, 2, 3, 4, 0, 1, 2, 3, 4)])
    plan = run.backend.plan(batch)
    other = run.batch([(sequence, 1) for sequence in range(10)])
    assert batch.prefixes is not None
    assert other.prefixes is not None
    query, key, value = (torch.randn(10, heads, 16) for heads in (2, 1, 1))
    run.backend.forward(run.layer, query, key, value, run.cache, plan)
    for shared in (True, False):
        expected = run.backend.forward(
            run.layer, query, key, value, run.cache, run.backend.plan(replace(other, prefixes=None))
        )
        for name in ("seq_lens", "slot_mapping", "block_table"):
            getattr(batch, name).copy_(getattr(other, name))
        for name in ("group_starts", "members", "shared_lens", "own_lens"):
            getattr(batch.prefixes, name).copy_(getattr(other.prefixes, name))
        if not shared:
            batch.prefixes.group_starts.zero_()
            batch.prefixes.shared_lens.zero_()
            batch.prefixes.own_lens.copy_(other.seq_lens)
        output = run.backend.forward(run.layer, query, key, value, run.cache, plan)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


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


@pytest.mark.parametrize("two_loops", [False, True])
def test_an_8_bit_cache(two_loops: bool) -> None:
    run = AttentionTrial(
        with_two_loops() if two_loops else backend(8), AttentionLayer(0, 4, 2, 16, 0.25), 16, torch.float32,
        torch.float8_e4m3fn,
    )  # fmt: skip
    run.fill(1, 75)
    for rows in (((0, 35), (1, 20)), ((1, 1), (0, 1))):
        assert run.step(rows) < TOLERANCE[torch.float32]
    key = torch.full((1, 2, 16), 1e4)
    batch = run.pool.step([(2, 1)])
    output = run.backend.forward(run.layer, torch.ones(1, 4, 16), key, -key, run.cache, run.backend.plan(batch))
    assert (output == -448).all()


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
def test_reference_tokens(smollm2_gguf: Path, golden: list[dict[str, Any]]) -> None:
    """All prompts in one batch: prefills of several lengths, then decodes, through thirty layers.

    The two shortest prompts and the first tokens of their answers by default; LLMKIT_DEEP_TESTS=1: more of both."""
    from llmkit import LLM, SamplingParams

    num_prompts, num_tokens = (6, 8) if os.environ.get("LLMKIT_DEEP_TESTS") == "1" else (2, 2)
    items = sorted(golden, key=lambda item: len(item["prompt_token_ids"]))[:num_prompts]
    prompts = [{"prompt_token_ids": item["prompt_token_ids"]} for item in items]
    settings = {"dtype": "float32", "max_model_len": 1024, "num_blocks": 400, "num_threads": 1}
    with LLM(smollm2_gguf, **settings, **{"attention.backend": "triton"}) as llm:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    assert answers == [item["output_token_ids"][:num_tokens] for item in items]
