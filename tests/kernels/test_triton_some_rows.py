"""Products of some rows in the `triton` kernel table, and their parts. See `triton_cases.py`."""

from __future__ import annotations

import pytest
import torch
from triton_cases import HALVES, REFERENCE, assert_near, kernels, random

pytest.importorskip("triton")

# Whole blocks of columns and not, a last program with some of its rows.
SHAPES = [(9, 48, 256), (16, 100, 400), (33, 33, 1040), (64, 130, 128)]
# Several blocks of rows, the last one whole and not.
PARTS = [(9, 48, 256), (64, 100, 400), (30, 33, 1040), (64, 32, 768), (65, 100, 400), (192, 33, 1040), (250, 48, 256)]


@kernels
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_products(table, rows: int, n: int, k: int, biased: bool, dtype: torch.dtype) -> None:
    from llmkit_kernels import triton_some_rows

    x, weight = random(rows, k, dtype=dtype), random(n, k, dtype=dtype) / k**0.5
    bias = random(n, dtype=dtype) if biased else None
    assert triton_some_rows.takes(x, weight)
    actual = table.linear(x, weight, bias)
    assert actual.dtype == dtype
    exact = REFERENCE.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_near(actual, exact, dtype)


@kernels
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_a_product_and_the_activation_behind_it(table, rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, residual = random(rows, k, dtype=dtype), random(k, rows, dtype=dtype).reshape(rows, k)
    norm, weight = random(k, dtype=dtype), random(2 * n, k, dtype=dtype) / k**0.5
    normed, total = REFERENCE.add_rms_norm(x.clone(), residual.clone(), norm, 1e-5)
    expected = REFERENCE.silu_and_mul(REFERENCE.linear(normed.double(), weight.double()))
    actual, summed = table.add_rms_norm_silu(x, residual, norm, 1e-5, weight)
    assert torch.equal(summed, total)
    assert_near(actual, expected, dtype, roundings=4)


@kernels
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "n", "k"), PARTS)
def test_parts_of_a_product_are_added_up_by_the_norm(table, rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, weight = random(rows, k, dtype=dtype), random(n, k, dtype=dtype) / k**0.5
    residual, norm = random(rows, n, dtype=dtype), random(n, dtype=dtype)
    exact = REFERENCE.linear(x.double(), weight.double())
    parts = table.linear_in_parts(x, weight)
    assert parts.dtype == torch.float32
    assert parts.shape[0] > 1
    torch.testing.assert_close(parts.double().sum(0), exact, rtol=1e-4, atol=1e-4)

    rounded = parts.sum(0).to(dtype)
    expected, total = REFERENCE.add_rms_norm(rounded, residual.clone(), norm, 1e-5)
    actual, summed = table.add_rms_norm(parts, residual, norm, 1e-5)
    assert actual.dtype == summed.dtype == dtype
    assert_near(summed, total, dtype)
    assert_near(actual, expected, dtype)


@kernels
def test_a_fused_norm_takes_parts(table) -> None:
    dtype = HALVES[-1]
    parts, residual = random(3, 20, 64), random(20, 64, dtype=dtype)
    norm, weight = random(64, dtype=dtype), random(96, 64, dtype=dtype) / 8
    normed, total = REFERENCE.add_rms_norm(parts.sum(0).to(dtype), residual.clone(), norm, 1e-5)
    expected = REFERENCE.silu_and_mul(REFERENCE.linear(normed.double(), weight.double()))
    assert table.add_rms_norm_linear(parts, residual, norm, 1e-5, weight) is None
    actual, summed = table.add_rms_norm_silu(parts, residual, norm, 1e-5, weight)
    assert_near(summed, total, dtype)
    assert_near(actual, expected, dtype, roundings=4)


@kernels
def test_products_that_the_kernel_is_not_for(table) -> None:
    from llmkit_kernels.triton_some_rows import MOST_ROWS, MOST_ROWS_IN_PARTS, takes, takes_in_parts

    x, weight = random(20, 64, dtype=torch.float16), random(32, 64, dtype=torch.float16)
    assert takes(x, weight)
    assert not takes(x.float(), weight.float())
    assert not takes(random(MOST_ROWS + 1, 64, dtype=torch.float16), weight)
    assert not takes(x[:0], weight)
    assert not takes(x[:, :40], weight[:, :40])
    assert not takes_in_parts(x, weight), "one block of columns has no parts"
    long, deep = random(MOST_ROWS_IN_PARTS + 1, 512, dtype=torch.float16), random(32, 512, dtype=torch.float16)
    assert takes_in_parts(long[1:], deep)
    assert not takes_in_parts(long, deep)
    assert table.linear_in_parts(long, deep) is None
    assert table.linear_in_parts(long[1:], deep, deep[:, 0]) is None, "a bias is not in parts"
    assert table.linear_in_parts(long[:4], deep) is None, "few rows are another kernel's"
    more = random(MOST_ROWS + 1, 64, dtype=torch.float16)
    assert_near(table.linear(more, weight), REFERENCE.linear(more, weight), torch.float16)


def test_blocks() -> None:
    from llmkit.jit.device import Device
    from llmkit_kernels.triton_some_rows import _chosen

    device = Device(132, 227 * 1024)
    # Queries, keys and values; gate and up: the most rows with a program for most multiprocessors.
    assert [_chosen(n, 1024, 1, device).rows for n in (4096, 6144, 28672)] == [32, 64, 128]
    # Output and down: as many splits as there are multiprocessors for.
    chosen = [_chosen(n, k, 2, device) for n, k in ((1024, 2048), (1024, 3072), (4096, 14336), (16384, 512), (64, 128))]
    assert [(block.rows, block.splits) for block in chosen] == [(32, 4), (32, 4), (64, 2), (128, 1), (32, 1)]
    # More rows of the batch are as many more programs, until one part is left, which is the library's.
    chosen = [_chosen(n, k, 2, device, blocks) for n, k in ((1024, 3072), (2048, 6144)) for blocks in (2, 3, 4)]
    assert [(block.rows, block.splits) for block in chosen] == [(64, n) for n in (4, 2, 2, 2, 1, 1)]
    assert _chosen(6144, 1024, 1, Device(132, 99 * 1024)).stages == 3
