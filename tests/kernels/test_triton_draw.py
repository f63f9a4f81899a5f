"""Tokens drawn by the `triton` kernel table, and what a step begins with. See `triton_cases.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from triton_cases import DEVICE, DTYPES, HALVES, INTERPRETED, kernels, random

from llmkit.sampling.device_draw import (
    NOT_FINITE,
    DeviceDraws,
    DeviceTruncation,
    DrawParameters,
    LastTokens,
    draw_or_best,
)

pytest.importorskip("triton")


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
