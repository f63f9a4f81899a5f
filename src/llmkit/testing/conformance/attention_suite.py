"""What is asked of an attention backend: that it does what `support` and `page_sizes` claim, and touches nothing else.

Everything is random with fixed seeds. Where kernels in Triton are interpreted, fewer and smaller cases are tried.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from llmkit.hookspecs.attention import AttentionLayer, Support
from llmkit.testing.attention import SHAPES, TOLERANCE, AttentionTrial, shaped_layer, single_threaded, split_heads
from llmkit.testing.attention_claims import (
    DTYPES,
    INTERPRETED,
    Claims,
    Rows,
    StepPlannedOnce,
    check,
    drawn_case,
    drawn_load,
    drawn_projection,
)
from llmkit.testing.conformance.target import Conformance
from llmkit.testing.paged_attention import dense_attention

NUM_CASES = 4 if INTERPRETED else 40
LONG = 600 if INTERPRETED else 5000  # tokens of a long context
VERY_LONG = 9000
UNTOUCHED = 0.5
"""What a cache holds before: no key or value of the test is as small, and zeros that are written show as well."""
MIXED: list[Rows] = [
    ((0, 5), (1, 12 if INTERPRETED else 70), (2, 1)),  # prompts
    ((2, 1), (1, 3), (0, 17)),  # decode, a few drafts, a chunk, in another order
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with single_threaded():
        yield


@pytest.fixture
def claims(conformance: Conformance) -> Claims:
    return Claims(conformance.create(), conformance.device, conformance.environment.compute_capability)


def layer_or_skip(claims: Claims, window: int | None = None, cap: float | None = None) -> AttentionLayer:
    layer = claims.layer(window, cap)
    if layer is None:
        pytest.skip(f"it takes no layer with window {window} and cap {cap}")
    return layer


# ---- what it says


def test_it_takes_an_ordinary_layer(claims: Claims) -> None:
    layer = AttentionLayer(0, 8, 2, 64, 0.125)
    support = claims.support(layer, torch.bfloat16, torch.bfloat16)
    assert claims.layer() is not None, f"it takes no layer here: {'; '.join(support.reasons)}"


def test_it_answers_any_question_with_reasons(claims: Claims) -> None:
    """Also for other machines than this one, always in the same way."""
    draw = random.Random(1)
    cases = [drawn_case(draw) for _ in range(300)]
    machines = (("cpu", None), ("cuda", None), ("cuda", (7, 0)), ("cuda", (9, 0)), ("cuda", (12, 0)), ("xpu", None))
    for case in cases:
        device, capability = draw.choice(machines)
        asked = replace(claims, device=device, compute_capability=capability)
        support = asked.support(case.layer, case.dtype, case.kv_dtype)
        assert isinstance(support, Support), f"support() returned a {type(support).__name__} for {case}"
        assert isinstance(support.score, int), f"the score for {case} is {support.score!r}, not a whole number"
        assert isinstance(support.grounds, str), f"the grounds for {case} are {support.grounds!r}, not a text"
        assert isinstance(support.reasons, tuple), f"the reasons for {case} are a {type(support.reasons).__name__}"
        for reason in support.reasons:
            assert isinstance(reason, str), f"a reason against {case} is {reason!r}, not a sentence"
            assert reason.strip(), f"a reason against {case} is empty, which tells the user nothing"
        assert asked.support(case.layer, case.dtype, case.kv_dtype) == support, f"two answers to one question: {case}"


def test_page_sizes_and_cache_shapes(claims: Claims) -> None:
    sizes = list(claims.backend.page_sizes())
    assert sizes, "page_sizes() is empty"
    assert all(isinstance(size, int) and size > 0 for size in sizes), f"page sizes are numbers of tokens, not {sizes}"
    assert len(set(sizes)) == len(sizes), f"a page size occurs twice in {sizes}"
    for size in sizes:
        shape = claims.backend.kv_shape(7, size, 2, 64)
        assert shape[0] == 7, f"dimension 0 of kv_shape {shape} is not the page, so pages cannot be copied"
        elements = torch.Size(shape[1:]).numel()
        assert elements >= 2 * 2 * size * 64, f"a page of shape {shape[1:]} does not hold {size} keys and values"
    assert claims.backend.kv_format() == claims.backend.kv_format()


# ---- agreement with the definition


@pytest.mark.parametrize("name", SHAPES)
def test_a_kind_of_layer(claims: Claims, name: str) -> None:
    layer = shaped_layer(name)
    if claims.dtype_of(layer) is None:
        pytest.skip("it does not take this kind of layer")
    check(claims.trial(layer), MIXED[:1] if INTERPRETED else [*MIXED, ((1, 1), (0, 1), (2, 1)), ((3, 33),)], name)


def test_random_layers_that_it_takes(claims: Claims) -> None:
    """What it accepts works: heads, sizes, types, scales, windows, caps, pages and steps at random."""
    draw = random.Random(2)
    tried = 0
    for _ in range(40 * NUM_CASES):
        case = drawn_case(draw)
        if not claims.takes(case.layer, case.dtype, case.kv_dtype):
            continue
        size = draw.choice(list(claims.backend.page_sizes()))
        run = AttentionTrial(claims.backend, case.layer, size, case.dtype, case.kv_dtype, claims.device)
        check(run, drawn_load(draw), case)
        tried += 1
        if tried == NUM_CASES:
            break
    assert tried, "it takes none of the layers that were drawn"


def test_every_page_size(claims: Claims) -> None:
    layer = layer_or_skip(claims)
    for size in claims.backend.page_sizes():
        run = claims.trial(layer, size)
        run.fill(0, max(1, size - 3) if INTERPRETED else 2 * size)
        check(run, [((0, 9), (1, size % 7 + 1)), *([] if INTERPRETED else [((1, 2 * size), (0, 1))])], "page sizes")


def test_every_pair_of_types_that_it_takes(claims: Claims) -> None:
    layer = layer_or_skip(claims)
    load = [((0, 9), (1, 2))] if INTERPRETED else [((0, 50), (1, 7)), ((1, 1), (0, 1))]
    for dtype in DTYPES:
        for kv_dtype in (*DTYPES, torch.float8_e4m3fn):
            if claims.takes(layer, dtype, kv_dtype):
                size = claims.backend.page_sizes()[0]
                run = AttentionTrial(claims.backend, layer, size, dtype, kv_dtype, claims.device)
                check(run, load, f"{dtype} with a cache of {kv_dtype}")


@pytest.mark.parametrize("window", [None, 300])
def test_long_contexts(claims: Claims, window: int | None) -> None:
    """Single tokens and chunks over thousands of keys, beside short rows."""
    run = claims.trial(layer_or_skip(claims, window), capacity=LONG + 1200)
    run.fill(0, LONG)
    run.fill(1, 90)
    load: list[Rows] = [((0, 1), (1, 1))]
    if not INTERPRETED:
        load += [((1, 1), (0, 40), (2, 30)), ((0, 3), (1, 2), (2, 1))]
    check(run, load, f"long contexts, window {window}")


def test_contexts_beyond_eight_thousand(claims: Claims) -> None:
    """What is made for as many keys must take more."""
    if INTERPRETED:
        pytest.skip("takes too long when kernels are interpreted")
    run = claims.trial(layer_or_skip(claims), capacity=VERY_LONG + 1200)
    run.fill(0, VERY_LONG)
    check(run, [((0, 1), (1, 1)), ((0, 3), (1, 2))], "very long contexts")


def test_a_prompt_in_chunks(claims: Claims) -> None:
    draw = random.Random(3)
    run = claims.trial(layer_or_skip(claims))
    left = 40 if INTERPRETED else 400
    while left:
        chunk = min(left, draw.randint(1, 33 if INTERPRETED else 150))
        check(run, [((0, chunk), (1, 1))], "a prompt in chunks beside a decode")
        left -= chunk


def test_a_chunk_longer_than_any_tile(claims: Claims) -> None:
    if INTERPRETED:
        pytest.skip("takes too long when kernels are interpreted")
    check(claims.trial(layer_or_skip(claims, window=100)), [((0, 300), (1, 270)), ((0, 1), (1, 290))], "long chunks")


def test_rows_of_one_token_in_a_large_batch(claims: Claims) -> None:
    count = 7 if INTERPRETED else 300  # more than engines run at a time by default
    run = claims.trial(layer_or_skip(claims), capacity=400 * claims.backend.page_sizes()[0])
    check(run, [tuple((sequence, 1) for sequence in range(count))], "first tokens")
    check(run, [tuple((sequence, 1) for sequence in reversed(range(0, count, 2)))], "second tokens")


@pytest.mark.parametrize("window", [None, 100])
def test_rows_that_begin_with_the_same_pages(claims: Claims, window: int | None) -> None:
    """Two groups of rows with one prefix each, beside a row of its own and one of several tokens."""
    page = claims.backend.page_sizes()[0]
    long, short = (-(-tokens // page) * page for tokens in (256, 128))
    run = claims.trial(layer_or_skip(claims, window), capacity=40 * page + 1200)
    run.fill(0, long + 20)
    run.fill(1, short + 5)
    run.fork(0, (2, 3, 4, 5), long)
    run.fork(1, (6, 7, 8), short)
    rows = tuple((sequence, 1) for sequence in (0, 6, 2, 7, 10, 3, 8, 4, 1, 5))
    check(run, [rows] if INTERPRETED else [rows, rows[::-1], (*rows[:4], (11, 3), *rows[4:])], "shared prefixes")


def test_any_number_of_threads(claims: Claims) -> None:
    if claims.device != "cpu" or INTERPRETED:
        pytest.skip("for backends that compute on the CPU")
    torch.set_num_threads(3)
    check(claims.trial(layer_or_skip(claims)), [*MIXED, ((2, 1), (0, 1), (1, 1))], "three threads")


# ---- nothing else is read or written


@pytest.mark.parametrize("window", [None, 11])
def test_nothing_beyond_a_row_is_read(claims: Claims, window: int | None) -> None:
    """Neither what block tables hold behind a row's pages, nor unwritten tokens, nor other pages."""
    layer = layer_or_skip(claims, window)
    run = claims.trial(layer)
    for rows in (((0, 21), (1, 2)), ((0, 1), (1, 1))):
        before = run.cache.clone()  # what is not written is NaN
        batch = run.pool.step(rows, claims.device)
        given = split_heads(layer, run.draw_merged(batch.num_tokens).to(claims.device))
        outputs = []
        for rubbish, page in ((float("nan"), 2**30), (float("inf"), -1), (0.0, 0)):
            run.cache = torch.where(before.isnan(), rubbish, before)
            table = torch.where(batch.block_table == 2**30, page, batch.block_table)
            plan = claims.backend.plan(replace(batch, block_table=table))
            outputs.append(claims.backend.forward(layer, *given, run.cache, plan).cpu().float())
            run.cache = torch.where(before.isnan() & (run.cache == rubbish), float("nan"), run.cache)
        assert outputs[0].isfinite().all(), f"unwritten keys or values (NaN) reach the answer of {rows}"
        for output in outputs[1:]:
            difference = (output - outputs[0]).abs().max().item()
            assert difference < TOLERANCE[run.dtype], f"what no row owns changes the answer of {rows}"


def test_pages_that_left_the_window_do_not_matter(claims: Claims) -> None:
    """They may have been given away; the table has the null page there, which holds anything finite."""
    page = claims.backend.page_sizes()[0]
    window = page + 4
    run = claims.trial(layer_or_skip(claims, window))
    length = 3 * page + window + 2
    run.fill(0, length)
    run.cache[0] = 1e4
    gone = (length - window + 1) // page  # pages that the next query sees nothing of
    run.pool.tables[0][:gone] = [0] * gone
    check(run, [((0, 1),), ((0, 9),)], "pages before the window")


@pytest.mark.parametrize("rows", [((0, 6), (1, 1)), ((0, 1), (1, 1), (2, 1))])
def test_negative_slots_are_not_written(claims: Claims, rows: Rows) -> None:
    layer = layer_or_skip(claims)
    run = claims.trial(layer)
    run.cache.fill_(UNTOUCHED)
    batch = run.pool.step(rows, claims.device)
    left_out = torch.arange(batch.num_tokens) % 3 == 1
    slots = batch.slot_mapping.clone()
    given = split_heads(layer, run.draw_merged(batch.num_tokens).abs().add(1).to(claims.device))
    for hidden in (torch.ones_like(left_out), left_out):
        batch.slot_mapping[:] = torch.where(hidden.to(slots.device), torch.full_like(slots, -1), slots)
        output = claims.backend.forward(layer, *given, run.cache, claims.backend.plan(batch))
        assert output.isfinite().all()
        written = int((run.cache != UNTOUCHED).sum())
        expected = int((~hidden).sum()) * 2 * layer.num_kv_heads * layer.head_size
        assert written == expected, f"{written} elements of the cache were written instead of {expected}"
    pages = {page for table in run.pool.tables.values() for page in table}
    others = [page for page in range(run.pool.num_pages) if page not in pages]
    assert (run.cache[others] == UNTOUCHED).all(), "a page of nobody was written"


def test_what_it_is_given_stays_as_it_is(claims: Claims) -> None:
    """Queries, keys and values are views of what a projection returned, and others read the batch as well."""
    layer = layer_or_skip(claims)
    run = claims.trial(layer)
    batch = run.pool.step(MIXED[0], claims.device)
    merged = run.draw_merged(batch.num_tokens).to(claims.device)
    given = split_heads(layer, merged)
    arrays = [merged, batch.query_start_loc, batch.seq_lens, batch.block_table, batch.slot_mapping]
    arrays += [torch.from_numpy(batch.query_start_loc_np), torch.from_numpy(batch.seq_lens_np)]
    before = [array.clone() for array in arrays]
    output = claims.backend.forward(layer, *given, run.cache, claims.backend.plan(batch))
    output.zero_()
    for array, copy in zip(arrays, before, strict=True):
        assert torch.equal(array, copy), "forward() or plan() changed its arguments, or the output shares their memory"


def test_keys_and_values_may_be_written_by_others(claims: Claims) -> None:
    """Where `slots` says that they may: `attend` then gives what `forward` gives."""
    layer = layer_or_skip(claims)
    run = claims.trial(layer)
    run.fill(0, 20)
    for rows in (((0, 3), (1, 4)), ((1, 1), (0, 1))):
        batch = run.pool.step(rows, claims.device)
        plan = claims.backend.plan(batch)
        slots = claims.backend.slots(plan)
        if slots is None:
            pytest.skip("it writes keys and values itself")
        assert torch.equal(slots, batch.slot_mapping), "slots() is not the slot mapping of the batch"
        query, key, value = split_heads(layer, run.draw_merged(batch.num_tokens).to(claims.device))
        cache = run.cache.clone()
        expected = claims.backend.forward(layer, query, key, value, run.cache, plan)
        pages, offsets = slots // batch.page_size, slots % batch.page_size
        for part, new in enumerate((key, value)):
            cache[pages, part, :, offsets] = new.to(cache.dtype)
        output = claims.backend.attend(layer, query, cache, claims.backend.plan(batch))
        difference = (output - expected).abs().max().item()
        assert difference < TOLERANCE[run.dtype], f"attend() differs from forward() by {difference:.2g}"
        assert torch.equal(cache.isnan(), run.cache.isnan()), "attend() wrote to the cache, or forward() elsewhere"


@pytest.mark.parametrize("normed", [True, False])
def test_what_the_projection_puts_out(claims: Claims, normed: bool) -> None:
    """`attend_projected`, where it takes such tokens, gives what norms, rotary embedding and `forward` give."""
    taken = 0
    for dtype in DTYPES:
        layer = AttentionLayer(0, 4, 2, 32, 32**-0.5)
        if not claims.takes(layer, dtype, dtype):
            continue
        run = AttentionTrial(claims.backend, layer, claims.backend.page_sizes()[0], dtype, dtype, claims.device)
        run.fill(0, 20)
        run.fill(1, 90)
        batch = run.pool.step([(1, 1), (2, 1), (0, 1)], claims.device)
        plan = claims.backend.plan(batch)
        projected = drawn_projection(run, batch, normed=normed)
        merged, cache = projected.merged.clone(), run.cache.clone()
        output = projected.attended(run.cache, plan)
        if output is None:
            assert torch.equal(run.cache.nan_to_num(), cache.nan_to_num()), f"{dtype}: it wrote what it does not take"
            continue
        taken += 1
        assert torch.equal(merged, projected.merged), f"{dtype}: it changed its arguments"
        expected = claims.backend.forward(layer, *projected.turned(), cache, claims.backend.plan(batch))
        difference = (output - expected).abs().max().item()
        assert difference < TOLERANCE[dtype], f"{dtype}: attend_projected() differs by {difference:.2g}"
        assert torch.equal(cache.isnan(), run.cache.isnan()), f"{dtype}: other cells of the cache are written"
        difference = (cache - run.cache).nan_to_num().abs().max().item()
        assert difference < 2 * TOLERANCE[dtype], f"{dtype}: what is written differs by {difference:.2g}"
    if not taken:
        pytest.skip("it leaves norms and rotary embedding to others")


# ---- steps of an engine


@pytest.mark.parametrize("window", [None, 30])
def test_a_step_planned_once_follows_the_lengths(claims: Claims, window: int | None) -> None:
    """What `graph_safe` says: planned once for long rows, right for any; on a GPU, replayed from a graph."""
    if not claims.backend.graph_safe:
        pytest.skip("its decode steps are planned one by one")
    layer = layer_or_skip(claims, window)
    run = claims.trial(layer)
    run.fill(0, 60 if INTERPRETED else 300)
    run.fill(1, 20)
    batch = run.pool.step([(0, 1), (1, 1)], claims.device)
    merged = run.draw_merged(2).to(claims.device)
    expected = claims.backend.forward(layer, *split_heads(layer, merged), run.cache, claims.backend.plan(batch))
    lengths = batch.seq_lens.clone()
    for longest in (lengths.max().item(), 70 if INTERPRETED else 900):  # without splits, with more than are needed
        most = np.full(2, longest, dtype=np.int32)
        plan = claims.backend.plan(replace(batch, seq_lens_np=most, max_seq_len=int(longest)))
        step = StepPlannedOnce(claims, layer, run.cache, merged, plan)
        for short in ((1, 1), (17, 9), None):  # other steps of the same rows before the one that is looked at
            batch.seq_lens[:] = lengths if short is None else torch.tensor(short, dtype=torch.int32)
            output = step.run(batch.seq_lens.cpu().numpy())
            assert output.isfinite().all(), f"planned for {longest} tokens, unwritten ones are read at {batch.seq_lens}"
        difference = (output - expected).abs().max().item()
        assert difference < TOLERANCE[run.dtype], f"planned for {longest} tokens, a step differs by {difference:.2g}"


def test_a_row_does_not_depend_on_its_neighbours(claims: Claims) -> None:
    layer = layer_or_skip(claims)
    alone, crowd = claims.trial(layer), claims.trial(layer)
    mine = alone.draw_merged(9).to(claims.device)
    plan = claims.backend.plan(alone.pool.step([(7, 9)], claims.device))
    first = claims.backend.forward(layer, *split_heads(layer, mine), alone.cache, plan)
    batch = crowd.pool.step([(1, 20), (7, 9), (2, 1)], claims.device)
    neighbours = crowd.draw_merged(21).to(claims.device)
    all_rows = split_heads(layer, torch.cat((neighbours[:20], mine, neighbours[20:])))
    second = claims.backend.forward(layer, *all_rows, crowd.cache, claims.backend.plan(batch))
    difference = (second[20:29] - first).abs().max().item()
    assert difference < TOLERANCE[alone.dtype], f"with neighbours, a row's answer differs by {difference:.2g}"


def test_plans_serve_several_layers_and_live_side_by_side(claims: Claims) -> None:
    """All layers of a KV group share a plan, and the plans of all groups are made before the first layer."""
    layer = layer_or_skip(claims)
    capped = layer if claims.layer(cap=2.0) is None else replace(layer, soft_cap=2.0)
    other = replace(capped if claims.dtype_of(capped) is claims.dtype_of(layer) else layer, index=1, scale=0.1)
    loads: list[Rows] = [((0, 11), (1, 1)), ((0, 3),)]
    runs = [claims.trial(layer), claims.trial(layer)]
    batches = [run.pool.step(rows, claims.device) for run, rows in zip(runs, loads, strict=True)]
    plans = [claims.backend.plan(batch) for batch in batches]
    for asked, group in ((layer, 0), (layer, 1), (other, 0), (other, 1)):
        run, batch = runs[group], batches[group]
        merged = run.draw_merged(batch.num_tokens)
        cache = torch.full_like(run.cache, float("nan"))
        given = split_heads(layer, merged.to(claims.device))
        output = claims.backend.forward(asked, *given, cache, plans[group]).cpu()
        starts = batch.query_start_loc_np.tolist()
        for start, stop in pairwise(starts):
            expected = dense_attention(asked, *split_heads(layer, merged[start:stop]))
            difference = (output[start:stop].double() - expected).abs().max().item()
            assert difference < TOLERANCE[run.dtype], f"off by {difference:.2g} with the plan of group {group}"
