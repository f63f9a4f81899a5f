"""The `triton` kernel table against the reference: on a GPU where there is one, and interpreted, in the process that
`test_interpreted.py` starts."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from llmkit.hookspecs.kernels import HeadNorms
from llmkit.sampling.device_draw import (
    NOT_FINITE,
    DeviceDraws,
    DeviceTruncation,
    DrawParameters,
    LastTokens,
    draw_or_best,
)
from llmkit_kernels.torch_table import TorchKernels

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
REFERENCE = TorchKernels()
# The interpreter cuts bfloat16 off instead of rounding.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
HALVES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

kernels = pytest.mark.skipif(False, reason="interpreted") if INTERPRETED else pytest.mark.gpu


@pytest.fixture
def table():
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    from llmkit_kernels.triton_table import TritonKernels

    return TritonKernels()


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 64), (1, 576), (5, 2050), (0, 16)])
def test_norms(table, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = random(*shape, dtype=dtype), random(*shape[::-1], dtype=dtype).reshape(shape)
    weight = random(shape[1], dtype=dtype)
    assert_close(table.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    expected = REFERENCE.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    for actual, wanted in zip(table.add_rms_norm(x, residual, weight, 1e-5), expected, strict=True):
        assert_close(actual, wanted)


@kernels
def test_norm_with_a_float32_weight_rounds_once(table) -> None:
    x, weight = random(4, 96, dtype=torch.float16), random(96)
    assert_close(table.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))


@kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 1026])
def test_embedding_and_the_norm_behind_it(table, size: int, dtype: torch.dtype) -> None:
    weight, norm = random(50, size + 6, dtype=dtype)[:, :size], random(size, dtype=dtype)
    ids = torch.tensor([7, 0, 49, 7], device=DEVICE)
    normed, vectors = table.embedding_norm(ids, weight, norm, 1e-6)
    assert torch.equal(vectors, REFERENCE.embedding(ids, weight))
    assert_close(normed, table.rms_norm(vectors, norm, 1e-6))
    assert normed.is_contiguous()
    assert table.embedding_norm(ids[:0], weight, norm, 1e-6)[0].shape == (0, size)
    assert table.embedding_norm(ids, weight.T, norm[:50], 1e-6) is None


@kernels
@pytest.mark.parametrize("heads", [3, 16])
def test_norm_of_heads_cut_out_of_wider_rows(table, heads: int) -> None:
    wide, weight = random(5, 20 * 64), random(64)
    x = wide[:, 64 : 64 * (heads + 1)].view(5, heads, 64)
    assert not x.is_contiguous()
    assert_close(table.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))


@kernels
def test_operands_that_are_not_dense_take_the_reference(table) -> None:
    x, weight = random(64, 3).T, random(64)
    assert_close(table.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))
    assert_close(table.add_rms_norm(x, x, weight, 1e-6)[0], REFERENCE.add_rms_norm(x, x, weight, 1e-6)[0])
    gate_up = random(64, 3).T
    assert_close(table.silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up))


@kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size", "rotary_dim"), [(4, 2, 16, 16), (33, 1, 8, 8), (3, 3, 80, 20)])
def test_rotary(table, heads: int, kv_heads: int, size: int, rotary_dim: int, dtype: torch.dtype) -> None:
    projected = random(6, (heads + 2 * kv_heads) * size, dtype=dtype)
    table_of_angles = random(50, rotary_dim)
    positions = torch.tensor([0, 49, 3, 3, 17, 8], device=DEVICE)
    expected = projected.clone()
    for rows, operations in ((projected, table), (expected, REFERENCE)):
        query, key, _ = rows.split([heads * size, kv_heads * size, kv_heads * size], dim=-1)
        operations.rotary(positions, query, key, table_of_angles, size)
    assert_close(projected, expected)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not round to float8 as it should")
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_written_to_an_8_bit_cache(table, dtype: torch.dtype) -> None:
    """As they are to one of the model's type, in float8 and nothing beyond its largest number."""
    projected = random(37, 8 * 32, dtype=dtype) * 100
    angles, positions = random(50, 32), torch.arange(37, device=DEVICE)
    slots = torch.randperm(40, device=DEVICE)[:37]
    caches = [torch.zeros(10, 2, 2, 4, 32, dtype=kind, device=DEVICE) for kind in (dtype, torch.float8_e4m3fn)]
    for cache in caches:
        query, key, value = projected.clone().split([4 * 32, 2 * 32, 2 * 32], dim=-1)
        assert table.rotary_and_write(positions, query, key, value, angles, None, cache, slots)
    expected = caches[0].float().clamp(-448, 448)
    assert (expected.abs() == 448).any()
    assert torch.equal(caches[1].float(), expected.to(torch.float8_e4m3fn).float())


@kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "size", "rotary_dim", "normed"),
    [(5, 4, 2, 16, 16, True), (33, 9, 3, 8, 8, True), (6, 3, 3, 80, 20, True), (7, 5, 1, 24, 24, False)],
)
def test_heads_are_normed_rotated_and_written(
    table, tokens: int, heads: int, kv_heads: int, size: int, rotary_dim: int, normed: bool, dtype: torch.dtype
) -> None:
    """The one kernel beside the reference's operations, on rows of a merged projection; some tokens have no slot, the
    last is padding, and nothing else in the cache is touched."""
    projected = random(tokens, (heads + 2 * kv_heads) * size, dtype=dtype)
    angles, positions = random(50, rotary_dim), torch.arange(tokens, device=DEVICE) * 7 % 50
    query_norm, key_norm = random(size, dtype=dtype), random(size, 1, dtype=dtype).view(size) + 1
    norms = HeadNorms(query_norm, key_norm, 1e-5) if normed else None
    page_size, pages = 4, tokens
    slots = torch.randperm(pages * page_size, generator=torch.Generator().manual_seed(tokens))[: tokens - 1].to(DEVICE)
    slots[1::3] = -1
    cache = random(pages, 2, kv_heads, page_size, size, dtype=dtype)
    expected, rows = cache.clone(), projected.clone()
    query, key, value = rows.split([heads * size, kv_heads * size, kv_heads * size], dim=-1)
    if normed:
        query = REFERENCE.rms_norm(query.view(tokens, heads, size), query_norm, 1e-5).view(tokens, -1)
        key = REFERENCE.rms_norm(key.reshape(tokens, kv_heads, size), key_norm, 1e-5).view(tokens, -1)
    REFERENCE.rotary(positions, query, key, angles, size)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            for part, new in enumerate((key, value)):
                expected[slot // page_size, part, :, slot % page_size] = new[token].view(kv_heads, size)
    mine = projected.split([heads * size, kv_heads * size, kv_heads * size], dim=-1)
    assert table.rotary_and_write(positions, *mine, angles, norms, cache, slots)
    assert_close(mine[0], query)
    assert_close(cache, expected)
    assert (cache == expected).float().mean() > 0.9


@kernels
def test_a_cache_in_another_order_is_left_to_others(table) -> None:
    rows, cache = random(2, 16), random(2, 2, 4, 2, 8).transpose(2, 3)
    slots = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    assert not table.rotary_and_write(slots, rows, rows, rows, random(4, 16), None, cache, slots)


@kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 1500])
def test_silu(table, size: int, dtype: torch.dtype) -> None:
    gate_up = random(3, 2 * size, dtype=dtype) * 4
    assert_close(table.silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up))


def draws_of(temperatures: list[float], min_p: list[float]) -> DeviceDraws:
    n = len(temperatures)
    seeds = torch.tensor([(-1) ** i * (2**62 + 12345 * i) for i in range(n)], device=DEVICE)
    return DeviceDraws(
        seeds,
        torch.arange(n, device=DEVICE) * 1000,
        torch.tensor(temperatures, dtype=torch.float32, device=DEVICE),
        torch.tensor(min_p, dtype=torch.float32, device=DEVICE).log(),
    )


def truncated(draws: DeviceDraws, top_k: list[int], top_p: list[float]) -> DeviceDraws:
    k, p = torch.tensor(top_k, device=DEVICE), torch.tensor(top_p, dtype=torch.float64, device=DEVICE)
    return replace(draws, truncation=DeviceTruncation(k, p))


def on_host(draws: DeviceDraws) -> DeviceDraws:
    cut = draws.truncation
    plain = [x.cpu() for x in (draws.seeds, draws.positions, draws.temperatures, draws.log_min_p)]
    return DeviceDraws(*plain, None if cut is None else DeviceTruncation(cut.top_k.cpu(), cut.top_p.cpu()))


@kernels
@pytest.mark.parametrize("coarse", [False, True], ids=["distinct", "many equal"])
@pytest.mark.parametrize(
    ("size", "spread"),
    # The interpreter goes over a row in blocks of 256.
    [(7, 3.0), *([(777, 3.0), (777, 0.02)] if INTERPRETED else [(1501, 3.0), (1501, 0.02), (152_000, 3.0)])],
)
def test_truncated_draws_are_those_of_the_reference(table, size: int, spread: float, coarse: bool) -> None:
    """top-k, top-p and min_p, alone and together, beside rows without; peaked and nearly flat rows; ties at the cut."""
    v = size
    cases = [  # temperature, top_k, top_p, min_p
        (1.0, 1, 1.0, 0.0), (0.7, 20, 1.0, 0.0), (1.0, v, 0.9, 0.0), (1.5, 50, 0.8, 0.0), (1.0, v, 0.5, 0.01),
        (2.0, 5, 0.999999, 0.02), (0.0, 3, 0.5, 0.0), (1.0, v, 1.0, 0.0), (1e-30, 9, 0.3, 0.0), (1.0, v, 1e-9, 0.0),
        (1.0, v - 1, 1.0, 0.0), (1.3, v // 2 + 1, 0.99, 0.0), (8.0, v, 0.97, 0.0),
    ]  # fmt: skip
    temperatures, top_k, top_p, min_p = (list(column) for column in zip(*cases, strict=True))
    draws = truncated(draws_of(temperatures, min_p), [min(k, v) for k in top_k], top_p)
    for trial in range(1 if INTERPRETED else 8):
        logits = random(len(cases), size + 3 * trial)[:, :size] * spread
        if coarse:
            logits = (logits * 4 / spread).round() * spread / 4
        before = logits.clone()
        tokens = table.draw(logits, replace(draws, positions=draws.positions + trial))
        expected = draw_or_best(logits.cpu(), on_host(replace(draws, positions=draws.positions + trial)))
        assert tokens.tolist() == expected.tolist()
        assert torch.equal(logits, before)
        alone = table.draw(logits[3:4], replace(draws.part(slice(3, 4)), positions=draws.positions[3:4] + trial))
        assert alone.tolist() == tokens[3:4].tolist()


@kernels
def test_what_is_cut_off_is_never_drawn(table) -> None:
    """The same row many times with other seeds: exactly the entries that are kept occur."""
    cases = [(3, 1.0, {270, 30, 31}), (300, 0.5, {270, 30, 31}), (4, 0.5, {270, 30})]
    times = 13 if INTERPRETED else 200
    logits = torch.full((3 * times, 300), -5.0, device=DEVICE)
    logits[:, [270, 30, 31, 32, 33]] = torch.tensor([1.0, 0.5, 0.5, 0.5, 0.5], device=DEVICE)
    draws = draws_of([1.0] * len(logits), [0.0] * len(logits))
    tokens = table.draw(logits, truncated(draws, [k for k, _, _ in cases] * times, [p for _, p, _ in cases] * times))
    for case, (_, _, kept) in enumerate(cases):
        assert set(tokens[case::3].tolist()) == kept


@kernels
@pytest.mark.parametrize("size", [5, 4096, 9001])
def test_draws_are_those_of_the_reference(table, size: int) -> None:
    draws = draws_of([0.0, 1.0, 0.6, 2.5, 1e-30, 5.0], [0.0, 0.0, 0.0, 0.3, 0.0, 0.01])
    for trial in range(1 if INTERPRETED else 20):
        logits = random(6, size + trial)[:, :size] * 3
        before = logits.clone()
        expected = draw_or_best(logits.cpu(), on_host(draws))
        assert table.draw(logits, draws).tolist() == expected.tolist()
        assert torch.equal(logits, before)


@kernels
@pytest.mark.parametrize("dtype", HALVES)
def test_draws_from_rows_of_the_model_s_type_are_those_of_the_same_in_float32(table, dtype: torch.dtype) -> None:
    draws = draws_of([0.0, 1.0, 0.6], [0.0, 0.0, 0.3])
    scores = random(3, 4099, dtype=dtype) * 3
    assert table.draw(scores, draws).tolist() == table.draw(scores.float(), draws).tolist()
    cut = truncated(draws, [4099, 20, 50], [0.9, 1.0, 0.8])
    assert table.draw(scores, cut).tolist() == table.draw(scores.float(), cut).tolist()


@kernels
@pytest.mark.parametrize("spread", [0.01, 3.0, 40.0])
def test_blocks_that_are_passed_over_hold_no_draw(table, monkeypatch: pytest.MonkeyPatch, spread: float) -> None:
    """A program with many blocks leaves most of them after cheap arithmetic: flat rows, where noise decides, and steep
    ones."""
    from llmkit_kernels import triton_draw

    monkeypatch.setattr(triton_draw, "_MOST_PARTS", 2)
    draws = draws_of([0.6, 1.0, 2.0, 1e-30], [0.0, 0.0, 0.001, 0.0])
    for trial in range(1 if INTERPRETED else 40):
        logits = random(4, (20_000 if INTERPRETED else 150_000) + trial) * spread
        assert table.draw(logits, draws).tolist() == draw_or_best(logits.cpu(), on_host(draws)).tolist()


@kernels
def test_a_row_draws_the_same_in_any_batch(table) -> None:
    draws = draws_of([0.8] * 8, [0.0] * 8)
    logits = random(8, 9001)
    together = table.draw(logits, draws).tolist()
    assert [table.draw(logits[i : i + 1], draws.part(slice(i, i + 1))).item() for i in range(0, 8, 3)] == together[::3]


@kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_company_of_any_size_and_kind_does_not_change_a_draw(table, dtype: torch.dtype) -> None:
    """Of equal scores: alone, where only its own parameters count, among 7 and among 64, in any place, between rows
    that are drawn in other ways."""
    size, rows = (777, 9) if INTERPRETED else (49_152, 64)
    ways = [(size, 1.0, 0.8), (size, 0.9, 0.8), (20, 1.0, 0.8), (size, 1.0, 0.0)]  # top_k, top_p, temperature
    top_k, top_p, temperatures = (list(column) for column in zip(*(ways[i % 4] for i in range(rows)), strict=True))
    draws, logits = draws_of(temperatures, [0.0] * rows), random(rows, size, dtype=dtype) * 3
    whole = truncated(draws, top_k, top_p)
    alone = [
        table.draw(logits[i : i + 1], (whole if i % 4 in (1, 2) else draws).part(slice(i, i + 1))).item()
        for i in range(rows)
    ]
    for company in (7, rows):
        places = torch.randperm(rows)[:company]
        cut = whole.truncation
        mixed = DeviceDraws(
            *(x[places] for x in (whole.seeds, whole.positions, whole.temperatures, whole.log_min_p)),
            DeviceTruncation(cut.top_k[places], cut.top_p[places]),
        )
        assert table.draw(logits[places], mixed).tolist() == [alone[i] for i in places.tolist()]


@kernels
@pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning"
)  # the interpreter's arithmetic is numpy's
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_told_apart(table, bad: float) -> None:
    logits = random(4, 5000)
    logits[1, 4500] = bad
    logits[2] = -torch.inf
    logits[3, :4999] = -torch.inf
    tokens = table.draw(logits, draws_of([0.0, 1.0, 1.0, 1.0], [0.0] * 4)).tolist()
    assert tokens[1:] == [NOT_FINITE, NOT_FINITE, 4999]
    assert table.draw(logits, draws_of([1.0, 0.0, 0.0, 0.0], [0.0] * 4)).tolist()[1:] == tokens[1:]


@kernels
def test_drawn_tokens_are_noted_down(table) -> None:
    """By the kernel and by the reference; with rows that fail and rows that are truncated."""
    logits = random(5, 4500)
    logits[1, 17] = float("nan")
    plain = draws_of([0.0, 1.0, 1.0, 0.6, 0.9], [0.0] * 5)
    for draws in (plain, truncated(plain, [4500, 4500, 20, 4500, 3], [1.0, 1.0, 0.9, 1.0, 1.0])):
        slots = torch.tensor([6, 2, 0, 5, 3])
        noted, referred = torch.full((8,), 99, device=DEVICE), torch.full((8,), 99)
        tokens = table.draw(logits, replace(draws, last_tokens=LastTokens(slots.to(DEVICE), noted)))
        reference = replace(on_host(draws), last_tokens=LastTokens(slots, referred))
        assert tokens.tolist() == draw_or_best(logits.cpu(), reference).tolist()
        assert tokens[1] == NOT_FINITE
        expected = dict(zip(slots.tolist(), tokens.clamp(min=0).tolist(), strict=True))
        assert noted.tolist() == referred.tolist() == [expected.get(slot, 99) for slot in range(8)]


@kernels
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (700, 3), (4, 300), (5, 0)])
def test_what_a_step_begins_with(table, tokens: int, rows: int, cut: bool) -> None:
    count = 301
    truncation = DeviceTruncation(torch.arange(count, device=DEVICE), torch.rand(count, dtype=torch.float64).to(DEVICE))
    of_slots = DrawParameters(
        torch.arange(count, device=DEVICE) - 2**62, random(count), random(count + 1)[1:], truncation if cut else None
    )
    last_tokens = torch.arange(count, device=DEVICE) * 1000
    ids = torch.arange(tokens, device=DEVICE)
    ids[::2] = -1 - ids[::2] % count
    slots = torch.arange(rows, device=DEVICE).flip(0)
    entered, of_rows = table.enter_step(ids, last_tokens, slots, of_slots)
    assert entered.tolist() == [last_tokens[-1 - i].item() if i < 0 else i for i in ids.tolist()]
    expected = of_slots.of(slots)
    for name in ("seeds", "temperatures", "log_min_p"):
        assert torch.equal(getattr(of_rows, name), getattr(expected, name))
    assert (of_rows.truncation is not None) == cut
    if cut:
        assert torch.equal(of_rows.truncation.top_k, expected.truncation.top_k)
        assert torch.equal(of_rows.truncation.top_p, expected.truncation.top_p)


@kernels
@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_in_a_rehearsal_nothing_is_left_to_chance(table) -> None:
    """Who looks something up by what a kernel was to write would read anywhere."""
    from llmkit.jit.rehearsal import Rehearsal

    array = torch.zeros(3, device=DEVICE)
    ids = torch.full((256,), -1, device=DEVICE)
    with Rehearsal(torch.device(DEVICE)) as rehearsal:
        entered, _ = table.enter_step(ids, array.long() + 7, array.long(), DrawParameters(array.long(), array, array))
        assert entered.tolist() == [0] * 256
    assert rehearsal.num_kernels == 1


@kernels
def test_rows_of_which_min_p_leaves_only_equals(table) -> None:
    """No entry certainly beats others; all of a flat row may be drawn."""
    logits = torch.zeros(3, 9000, device=DEVICE)
    logits[1, ::2] = -1e-3
    draws = draws_of([1.0, 1.0, 1.0], [1.0, 1.0, 0.9])
    assert table.draw(logits, draws).tolist() == draw_or_best(logits.cpu(), on_host(draws)).tolist()


@kernels
def test_the_first_of_equals_is_the_best(table) -> None:
    logits = torch.zeros(2, 9000, device=DEVICE)
    logits[0, 8000] = logits[0, 5] = 1
    assert table.draw(logits, draws_of([0.0, 0.0], [0.0, 0.0])).tolist() == [5, 0]


def few_rows(rows: int, n: int, k: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        "x": random(rows, k, dtype=dtype),
        "residual": random(k, rows, dtype=dtype).reshape(rows, k),
        "norm": random(k, dtype=dtype) + 1,
        "weight": random(n, k, dtype=dtype) / k**0.5,
        "bias": random(n, dtype=dtype),
    }


# Whole blocks of columns and not, a last program with some of its rows, more columns than a program has at a time.
FEW_ROWS = [(1, 48, 512), (3, 37, 64), (8, 100, 1040), (5, 16, 2064)]


@pytest.fixture(params=["held", "streamed"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which of the two kernels has the weight."""
    from llmkit_kernels import triton_held_rows

    held = request.param == "held"
    monkeypatch.setattr(triton_held_rows, "takes", lambda _weight, **_: held)
    return str(request.param)


@kernels
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("rows", "n", "k"), FEW_ROWS)
def test_products_of_a_few_rows(table, rows: int, n: int, k: int, biased: bool, dtype: torch.dtype) -> None:
    from llmkit_kernels import triton_few_rows

    given = few_rows(rows, n, k, dtype)
    bias = given["bias"] if biased else None
    assert triton_few_rows.takes(given["x"], given["weight"])
    actual = table.linear(given["x"], given["weight"], bias)
    exact = REFERENCE.linear(given["x"].float(), given["weight"].float(), None if bias is None else bias.float())
    assert_close(actual, exact.to(dtype))


@kernels
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "n", "k"), FEW_ROWS)
@pytest.mark.usefixtures("table", "way")
def test_a_norm_and_the_product_behind_it(rows: int, n: int, k: int, gated: bool) -> None:
    from llmkit_kernels import triton_few_rows

    # The interpreter has no bfloat16 that rounds; the table takes nothing else here, as float16 could overflow.
    dtype = HALVES[-1]
    given = few_rows(rows, 2 * n if gated else n, k, dtype)
    x, residual, norm, weight = (given[name] for name in ("x", "residual", "norm", "weight"))
    total = x + residual
    normed = REFERENCE.rms_norm(total.float(), norm.float(), 1e-5)
    expected = REFERENCE.linear(normed, weight.float(), given["bias"].float() if not gated else None)
    kept = x.clone(), residual.clone()
    if gated:
        expected = REFERENCE.silu_and_mul(expected)
        actual, summed = triton_few_rows.normed_silu(x, residual, norm, 1e-5, weight)
    else:
        actual, summed = triton_few_rows.normed_linear(x, residual, norm, 1e-5, weight, given["bias"])
    assert torch.equal(summed, total)
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])
    tolerance = 4 * TOLERANCE[dtype]  # several roundings to it on the way
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


@kernels
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("rows", "n", "k"), FEW_ROWS)
def test_a_product_and_the_activation_behind_it(table, rows: int, n: int, k: int) -> None:
    given = few_rows(rows, 2 * n, k, torch.float16)
    x, residual, norm, weight = (given[name] for name in ("x", "residual", "norm", "weight"))
    normed, total = REFERENCE.add_rms_norm(x.clone(), residual.clone(), norm, 1e-5)
    expected = REFERENCE.silu_and_mul(REFERENCE.linear(normed.float(), weight.float()))
    # float16: with a norm of its own.
    actual, summed = table.add_rms_norm_silu(x, residual, norm, 1e-5, weight)
    assert_close(summed, total)
    tolerance = 4 * TOLERANCE[torch.float16]
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


@kernels
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.usefixtures("table", "way")
def test_a_row_s_product_is_the_same_in_any_batch(gated: bool) -> None:
    from llmkit_kernels import triton_few_rows

    given = few_rows(8, 64, 1040, HALVES[-1])
    x, residual, norm, weight = (given[name] for name in ("x", "residual", "norm", "weight"))

    def product(rows: slice) -> torch.Tensor:
        if gated:
            return triton_few_rows.normed_silu(x[rows], residual[rows], norm, 1e-5, weight)[0]
        return triton_few_rows.normed_linear(x[rows], residual[rows], norm, 1e-5, weight, None)[0]

    together = product(slice(0, 8))
    for rows in (slice(2, 3), slice(0, 5)):
        assert torch.equal(product(rows), together[rows])


def test_weights_that_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the 0.6B shape on an H200, none of the 1.7B shape and none of the 135M shape."""
    from llmkit.jit.device import Device
    from llmkit_kernels import triton_held_rows

    monkeypatch.setattr(triton_held_rows, "device_of", lambda _: Device(132, 227 * 1024))

    def held(n: int, k: int, fused: bool) -> bool:
        return triton_held_rows.takes(torch.empty(n, k, dtype=torch.bfloat16, device="meta"), fused=fused)

    right = [(4096, 1024, True), (1024, 2048, False), (6144, 1024, True), (1024, 3072, False)]
    large = [(4096, 2048, True), (2048, 2048, False), (12288, 2048, True), (2048, 6144, False)]
    small = [(960, 576, True), (576, 576, False), (3072, 576, True), (576, 1536, False)]
    assert not any(held(*each) for each in right)  # kernels cannot start early there
    monkeypatch.setattr(triton_held_rows, "follows_early", lambda _: True)
    assert [held(*each) for each in right + large + small] == [True] * 4 + [False] * 8


@kernels
def test_products_that_the_kernel_of_few_rows_is_not_for(table) -> None:
    from llmkit.jit.few_rows import MOST_ROWS
    from llmkit_kernels.triton_few_rows import takes, takes_norm

    x, weight = random(4, 64, dtype=torch.float16), random(32, 64, dtype=torch.float16)
    norm = random(64, dtype=torch.float16)
    assert takes(x, weight)
    assert not takes_norm(x, x, norm, weight)
    assert takes_norm(*(each.to(torch.bfloat16) for each in (x, x, norm, weight)))
    assert not takes(x.float(), weight.float())
    assert not takes(random(MOST_ROWS + 1, 64, dtype=torch.float16), weight)
    assert not takes(x[:0], weight)
    assert not takes(x[:, :40], weight[:, :40])
    assert table.add_rms_norm_linear(x, x, norm, 1e-5, weight) is None
    assert table.add_rms_norm_silu(x.float(), x.float(), norm.float(), 1e-5, weight.float()) is None
    more = random(MOST_ROWS + 1, 64, dtype=torch.float16)
    assert_close(table.linear(more, weight), REFERENCE.linear(more, weight))


def test_shared_memory_limits_what_is_under_way() -> None:
    from llmkit.jit.few_rows import fitted
    from llmkit_kernels.triton_few_rows import _FEW_PROGRAMS, _NORMED

    assert fitted(_FEW_PROGRAMS, 2, False, 227 * 1024) == _FEW_PROGRAMS
    assert fitted(_NORMED, 2, True, 227 * 1024) == _NORMED
    assert fitted(_FEW_PROGRAMS, 2, False, 99 * 1024).stages == 5
    assert fitted(_NORMED, 2, True, 32 * 1024).stages == 2
