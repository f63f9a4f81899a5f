"""Products of a few rows in the `triton` kernel table against the reference. See `triton_cases.py`."""

from __future__ import annotations

import pytest
import torch
from triton_cases import HALVES, REFERENCE, TOLERANCE, assert_close, kernels, random

pytest.importorskip("triton")


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
