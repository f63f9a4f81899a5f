"""The `triton` kernels under Triton's interpreter, on the CPU. It must be chosen before Triton is imported, so
`test_triton.py` runs this file in a process of its own; by hand: TRITON_INTERPRET=1 pytest tests/attention/..."""

from __future__ import annotations

import os
from copy import deepcopy

import pytest
import torch

from llmkit.hookspecs.attention import AttentionBackend, AttentionLayer, AttentionQuery
from llmkit.testing.attention import SHAPES, TOLERANCE, AttentionTrial, shaped_layer
from llmkit.testing.paged_attention import PagedPool

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")

# (sequence, new tokens): prompts, then decode rows, a few drafts and a chunk, then decode alone
STEPS = (((0, 5), (1, 40), (2, 1)), ((0, 1), (1, 3), (2, 17)), ((2, 1), (0, 1), (1, 1)))


def backend(num_processors: int = 2) -> AttentionBackend:
    """Few processors: nothing is split; many: whatever is long enough."""
    from llmkit_attention.triton_backend import TritonAttention
    from llmkit_attention.triton_tiles import Device

    return TritonAttention(Device(num_processors, 2**17))


@pytest.mark.parametrize("name", SHAPES)
def test_agrees_with_the_definition(name: str) -> None:
    run = AttentionTrial(backend(), shaped_layer(name), 16)
    for rows in STEPS:
        assert run.step(rows) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_page_sizes(page_size: int) -> None:
    run = AttentionTrial(backend(), AttentionLayer(0, 3, 1, 24, 0.2, 50), page_size)
    for rows in (((0, 90), (1, 1)), ((0, 1), (1, 130)), ((0, 20), (1, 1))):
        assert run.step(rows) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
)
def test_types_of_model_and_cache(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    run = AttentionTrial(backend(), shaped_layer("window and cap"), 16, dtype, kv_dtype)
    for rows in STEPS:
        assert run.step(rows) < TOLERANCE[dtype]


def add_context(run: AttentionTrial, sequence: int, tokens: int) -> None:
    """Put random keys and values into the cache without attending to them."""
    batch = run.pool.step([(sequence, tokens)])
    pages, offsets = batch.slot_mapping // batch.page_size, batch.slot_mapping % batch.page_size
    for part, history in enumerate((run._keys, run._values)):
        new = run.draw(tokens, run.layer.num_kv_heads)
        run.cache[pages, part, :, offsets] = new
        history[sequence] = torch.cat((history.get(sequence, new[:0]), new))


def num_splits(run: AttentionTrial, rows: list[tuple[int, int]]) -> list[int]:
    """In how many splits each launch of a step with these rows would go."""
    pool = deepcopy(run.pool)
    plan = run.backend.plan(pool.step(rows))
    return [launch.num_splits for launch in run.backend._launches(run.layer, run.dtype, run.kv_dtype, plan)]


@pytest.mark.parametrize("window", [None, 300])
def test_long_sequences_are_split_and_combined(window: int | None) -> None:
    run = AttentionTrial(backend(8), AttentionLayer(0, 4, 2, 16, 0.25, window, 4.0), 16)
    add_context(run, 0, 599)
    add_context(run, 1, 90)
    for rows in ([(0, 1), (1, 1)], [(0, 12), (1, 1)], [(1, 3), (0, 1), (2, 5)]):
        assert max(num_splits(run, rows)) > 1
        assert run.step(rows) < TOLERANCE[torch.float32]


def test_more_splits_than_are_combined_at_once() -> None:
    run = AttentionTrial(backend(4000), AttentionLayer(0, 1, 1, 16, 0.25), 64)
    run.pool = PagedPool(num_pages=60, page_size=64)
    run.cache = run.pool.caches(run.backend, [run.layer], torch.float32, fill=float("nan"))[0]
    add_context(run, 0, 3000)
    assert num_splits(run, [(0, 1)])[0] > 16
    assert run.step([(0, 1)]) < TOLERANCE[torch.float32]


def test_more_heads_than_a_program_takes() -> None:
    run = AttentionTrial(backend(), AttentionLayer(0, 71, 1, 16, 0.25), 16)
    for rows in (((0, 3), (1, 1)), ((0, 1), (1, 2))):
        assert run.step(rows) < TOLERANCE[torch.float32]


def test_negative_slots_are_not_written_and_padding_is_zero() -> None:
    layer = shaped_layer("grouped")
    pool = PagedPool(num_pages=8, page_size=16)
    tried = backend()
    cache = pool.caches(tried, [layer], torch.float32)[0]
    batch = pool.step([(0, 6)])
    batch.slot_mapping[2:4] = -1
    key = torch.ones(8, 3, 64)
    output = tried.forward(layer, torch.ones(8, 9, 64), key, 2 * key, cache, tried.plan(batch))
    assert not output[6:].any()
    page = cache[pool.tables[0][0]]
    assert page[0].amax(dim=(0, 2))[:6].tolist() == [1, 1, 0, 0, 1, 1]
    assert page[1].amax(dim=(0, 2))[:6].tolist() == [2, 2, 0, 0, 2, 2]
    cache[pool.tables[0][0]] = 0
    assert not cache.any()


def test_pages_that_left_the_window_do_not_matter() -> None:
    run = AttentionTrial(backend(), AttentionLayer(0, 4, 2, 16, 0.25, sliding_window=20), 16)
    run.step([(0, 70)])
    run.cache[0] = float("nan")
    run.pool.tables[0][:3] = [0, 0, 0]  # positions 0..47; the next query, at 70, sees 51..70
    assert run.step([(0, 1)]) < TOLERANCE[torch.float32]
    assert run.step([(0, 9)]) < TOLERANCE[torch.float32]


def test_interpreted_it_is_taken_only_when_named() -> None:
    from llmkit.registry import Registry, detect_environment

    query = AttentionQuery("cpu", None, torch.float32, torch.float32, 4, 2, 16)
    registry, environment = Registry.discover(), detect_environment()
    for choice in ("auto", "triton"):
        registry.create("attention", choice, environment, judge=lambda tried: tried.support(query))
    first, second = registry.selections
    assert first.name != "triton"
    assert second.name == "triton"


def test_an_engine_answers_as_with_the_reference() -> None:
    from llmkit import LLM, SamplingParams

    tiny = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 48, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    prompts = [[5, 17, 3, 21, 8] * 9, [7, 7], [1, 2, 3]]
    answers = {}
    for name in ("torch", "triton"):
        settings = {"attention.backend": name, "execution.kernels": "torch", "max_num_batched_tokens": 32}
        with LLM(load_format="dummy", overrides=tiny, num_blocks=32, dtype="float32", **settings) as llm:
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
            answers[name] = [output.outputs[0].token_ids for output in outputs]
    assert answers["triton"] == answers["torch"]
