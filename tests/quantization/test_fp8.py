"""`fp8` against products in float64: its kernels on a GPU where there is one, and interpreted, in the process that
`tests/kernels/test_interpreted.py` starts."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from triton_cases import DEVICE, HALVES, INTERPRETED, REFERENCE, TOLERANCE, kernels, need_a_gpu

from llmkit.errors import ModelError
from llmkit.hookspecs import Environment
from llmkit_kernels.torch_table import TorchKernels
from llmkit_quantization import fp8, fp8_weight
from llmkit_quantization.fp8_weight import FLOAT8

pytest.importorskip("triton")

HOPPER = Environment(device_type="cuda", compute_capability=(9, 0))


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


@pytest.fixture
def method():
    need_a_gpu()
    return fp8.llmkit_quantization(None)


# ---- the format, on any device


def test_the_error_of_a_number_is_a_sixteenth_of_it_at_most() -> None:
    weight = torch.randn(64, 256) * torch.logspace(-6, 6, 64)[:, None]
    weight[3] = 0
    packed = fp8_weight.pack(weight)
    assert packed.codes.dtype is FLOAT8
    error, largest = (fp8_weight.widened(packed) - weight).abs(), weight.abs().amax(1, keepdim=True)
    assert (error <= torch.maximum(weight.abs() / 16, largest * 2**-18.8)).all()
    assert (packed.codes.float().abs().amax(1) == 448)[torch.arange(64) != 3].all()
    assert torch.equal(fp8_weight.widened(packed)[3], torch.zeros(256))


def test_packing_in_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(37, 48)
    whole = fp8_weight.pack(weight)
    monkeypatch.setattr(fp8_weight, "_PART", 5 * 48)
    in_parts = fp8_weight.pack(weight)
    assert torch.equal(whole.codes.view(torch.uint8), in_parts.codes.view(torch.uint8))
    assert torch.equal(whole.scales, in_parts.scales)


@pytest.mark.parametrize("role", ["linear", "lm_head", "embedding"])
@pytest.mark.parametrize("head", ["none", "fp8"])
def test_what_is_packed(role: str, head: str) -> None:
    method = fp8.llmkit_quantization(fp8.Fp8Options(lm_head=head))
    for n, k, fits in ((32, 48, True), (30, 48, False), (32, 40, False)):
        packed = method.pack(torch.randn(n, k, dtype=torch.bfloat16), role)
        assert (packed is not None) == (fits and (head == "fp8" or role == "linear"))
        assert method.nbytes(n, k, role, torch.bfloat16) == (2 * n * k if packed is None else packed.nbytes)


def test_rows_of_a_packed_embedding() -> None:
    method = fp8.llmkit_quantization(fp8.Fp8Options(lm_head="fp8"))
    weight = torch.randn(64, 32)
    packed = method.pack(weight, "embedding")
    rows = method.embedding(torch.tensor([63, 0, 0]), packed, torch.bfloat16)
    assert rows.dtype is torch.bfloat16
    assert torch.equal(rows, fp8_weight.widened(packed)[[63, 0, 0]].bfloat16())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    weight = torch.ones(16, 32)
    weight[1, 2] = value
    with pytest.raises(ModelError, match="not finite, which fp8 cannot hold"):
        fp8.llmkit_quantization(None).pack(weight, "linear")


def test_options_are_checked() -> None:
    for bad in ({"lm_head": "int8"}, {"head": "fp8"}):
        with pytest.raises(ValidationError):
            fp8.Fp8Options(**bad)


def test_it_is_for_gpus_that_multiply_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert fp8.llmkit_problems(HOPPER) == []
    (problem,) = fp8.llmkit_problems(Environment(device_type="cpu"))
    assert "needs a CUDA GPU" in problem
    (problem,) = fp8.llmkit_problems(Environment(device_type="cuda", compute_capability=(8, 6)))
    assert problem == "needs compute capability 8.9; the GPU has 8.6"
    monkeypatch.setattr(Environment, "has_module", lambda _, name: name != "triton")
    assert "needs triton, which is not installed" in fp8.llmkit_problems(HOPPER)


def test_auto_leaves_it_out() -> None:
    for stored in ({}, {"linear": frozenset({"F16"})}, {"linear": frozenset({"Q8_0"})}):
        assert "only when named" in fp8.llmkit_quantization(None).support(stored).reasons[0]


# ---- kernels


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """In units of the expected values' spread."""
    scale = expected.std()
    torch.testing.assert_close(actual.double() / scale, expected.double() / scale, rtol=tolerance, atol=tolerance)


@kernels
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (5, 48), (3, 1040)])
@pytest.mark.usefixtures("method")
def test_rows_are_rounded_as_the_definition_says(rows: int, size: int, dtype: torch.dtype) -> None:
    from llmkit_quantization.triton_fp8_rows import rounded_rows

    x = random(rows, 2 * size, dtype=dtype)[:, size:]
    x[0] = 0
    codes, scales = rounded_rows(x)
    expected, expected_scales = fp8_weight.rounded_rows(x)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    # A quotient in the middle between two numbers may go either way.
    torch.testing.assert_close(codes.float(), expected.float(), rtol=0.13, atol=2**-9)
    assert (codes.float() == expected.float()).float().mean() > 0.999


@kernels
@pytest.mark.filterwarnings("ignore:invalid value")  # of numpy, which interprets
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_so(method, bad: float) -> None:
    from llmkit.jit.few_rows import MOST_ROWS

    packed = method.pack(random(32, 64), "linear")
    for rows in (3, MOST_ROWS + 3):
        x = random(rows, 64, dtype=HALVES[-1])
        x[1, 5] = bad
        finite = method.linear(x, packed, None, REFERENCE).isfinite().all(dim=1)
        assert finite.tolist() == [row != 1 for row in range(rows)]


# Whole blocks of columns and not, a last program with some of its rows, more columns than a program has at a time.
FEW_ROWS = [(1, 48, 512), (3, 32, 64), (8, 112, 1040), (5, 16, 2064)]


@kernels
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("rows", "n", "k"), FEW_ROWS)
def test_products_of_a_few_rows_are_exact_but_for_the_weight(
    method, rows: int, n: int, k: int, biased: bool, dtype: torch.dtype
) -> None:
    x, weight = random(rows, k, dtype=dtype), random(n, k, dtype=dtype)
    weight[:, ::3] *= 1e-4  # numbers without a leading 1
    bias = random(n, dtype=dtype) if biased else None
    packed = method.pack(weight, "linear")
    expected = x.double() @ fp8_weight.widened(packed).double().T
    expected = expected if bias is None else expected + bias.double()
    actual = method.linear(x, packed, bias, REFERENCE)
    assert actual.dtype is dtype
    close(actual, expected, TOLERANCE[dtype])


@kernels
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "n", "k"), FEW_ROWS)
@pytest.mark.usefixtures("method")
def test_a_norm_and_the_product_behind_it(rows: int, n: int, k: int, gated: bool) -> None:
    from llmkit_quantization import triton_fp8_product

    dtype = HALVES[-1]
    x, residual, norm, bias = random(rows, k, dtype=dtype), random(rows, k, dtype=dtype), random(k) + 1, random(n)
    norm, bias = norm.to(dtype), bias.to(dtype)
    packed = fp8_weight.pack(random(2 * n if gated else n, k, dtype=dtype) / k**0.5)
    total = x + residual
    normed = REFERENCE.rms_norm(total.float(), norm.float(), 1e-5)
    expected = REFERENCE.linear(normed, fp8_weight.widened(packed), None if gated else bias.float())
    kept = x.clone(), residual.clone()
    if gated:
        expected = REFERENCE.silu_and_mul(expected)
        actual, summed = triton_fp8_product.normed_silu(x, residual, norm, 1e-5, packed)
    else:
        actual, summed = triton_fp8_product.normed_linear(x, residual, norm, 1e-5, packed, bias)
    assert torch.equal(summed, total)
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])
    close(actual, expected, 4 * TOLERANCE[dtype])  # several roundings to the type on the way


@kernels
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("rows", "n", "k"), [(9, 48, 64), (17, 32, 1040), (64, 144, 2064), (12, 64, 5120), (70, 112, 512)]
)
def test_products_of_many_rows_are_those_of_rounded_rows(
    method, rows: int, n: int, k: int, biased: bool, dtype: torch.dtype
) -> None:
    x, packed = random(rows, k, dtype=dtype), method.pack(random(n, k, dtype=dtype), "linear")
    bias = random(n, dtype=dtype) if biased else None
    codes, scales = fp8_weight.rounded_rows(x)
    expected = (codes.double() * scales[:, None].double()) @ fp8_weight.widened(packed).double().T
    expected = expected if bias is None else expected + bias.double()
    actual = method.linear(x, packed, bias, REFERENCE)
    assert actual.dtype is dtype
    close(actual, expected, 0.03)  # the matrix units add such products up in fewer bits than float32 has
    # Beside the product without any rounding.
    exact = x.double() @ fp8_weight.widened(packed).double().T + (0 if bias is None else bias.double())
    assert 0.001 < ((actual.double() - exact).std() / exact.std()).item() < 0.05


@kernels
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [2, 11, 67])
def test_operations_in_one_are_those_one_by_one(method, rows: int, dtype: torch.dtype) -> None:
    """What the layers ask for: norm, product, and the activation behind it, for few rows and many."""
    x, residual, norm = random(rows, 96, dtype=dtype), random(rows, 96, dtype=dtype), random(96, dtype=dtype) + 1
    bias = random(64, dtype=dtype)
    packed = method.pack(random(64, 96, dtype=dtype) / 10, "linear")
    normed, total = REFERENCE.add_rms_norm(x.clone(), residual.clone(), norm, 1e-5)
    expected = method.linear(normed, packed, bias, REFERENCE)
    actual, summed = method.add_rms_norm_linear(x.clone(), residual.clone(), norm, 1e-5, packed, bias, REFERENCE)
    torch.testing.assert_close(summed, total)
    close(actual, expected, 0.04)  # a number in the middle between two of float8 may be rounded either way
    assert summed.shape == x.shape
    expected = REFERENCE.silu_and_mul(method.linear(normed, packed, None, REFERENCE))
    actual, summed = method.add_rms_norm_silu(x.clone(), residual.clone(), norm, 1e-5, packed, REFERENCE)
    torch.testing.assert_close(summed, total)
    close(actual, expected, 0.04)


class InParts(TorchKernels):
    def add_rms_norm(self, x, residual, weight, eps):
        return super().add_rms_norm(x.sum(0).to(residual.dtype), residual, weight, eps)


@kernels
@pytest.mark.parametrize("rows", [2, 11, 67])
def test_what_is_not_added_up_yet_is_left_to_the_table(method, rows: int) -> None:
    dtype = HALVES[-1]
    parts, residual, norm = random(2, rows, 96), random(rows, 96, dtype=dtype), random(96, dtype=dtype) + 1
    packed = method.pack(random(64, 96, dtype=dtype) / 10, "linear")
    normed, total = InParts().add_rms_norm(parts.clone(), residual.clone(), norm, 1e-5)
    expected = method.linear(normed, packed, None, REFERENCE)
    actual, summed = method.add_rms_norm_linear(parts.clone(), residual.clone(), norm, 1e-5, packed, None, InParts())
    torch.testing.assert_close(summed, total)
    close(actual, expected, 0.04)
    actual, summed = method.add_rms_norm_silu(parts, residual, norm, 1e-5, packed, InParts())
    torch.testing.assert_close(summed, total)
    close(actual, REFERENCE.silu_and_mul(expected), 0.04)


@kernels
def test_columns_are_dealt_out_where_programs_are_few(method) -> None:
    """Parts are added up, and who counts them is ready for the next product."""
    from llmkit_quantization import triton_fp8_some_rows

    packed = method.pack(random(64, 5120), "linear")
    assert triton_fp8_some_rows._block(packed, 20).splits == 2
    for _ in range(3):
        x = random(20, 5120, dtype=HALVES[-1])
        codes, scales = fp8_weight.rounded_rows(x)
        expected = (codes.double() * scales[:, None].double()) @ fp8_weight.widened(packed).double().T
        close(method.linear(x, packed, None, REFERENCE), expected, 0.03)
        assert not packed.turns.any()


def test_splits_and_stages() -> None:
    """Of the 8B shapes on an H200: one program for each multiprocessor where there are few, else two."""
    from llmkit.jit.device import Device
    from llmkit_quantization.triton_fp8_some_rows import _chosen

    h200 = Device(132, 227 * 1024)
    chosen = {shape: _chosen(*shape, 64, h200) for shape in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))}
    assert [(block.splits, block.stages) for block in chosen.values()] == [(1, 4), (2, 4), (1, 3), (2, 4)]
    assert _chosen(28672, 4096, 16, h200).stages == 4
    assert _chosen(4096, 4096, 64, Device(132, 99 * 1024)).stages == 3


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="there are no graphs")
def test_a_captured_product_follows_its_rows(method) -> None:
    packed = method.pack(random(64, 128, dtype=torch.bfloat16), "linear")
    for rows in (4, 40, 80):
        x = random(rows, 128, dtype=torch.bfloat16)
        method.linear(x, packed, None, REFERENCE)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = method.linear(x, packed, None, REFERENCE)
        x.mul_(-3).add_(1)
        graph.replay()
        torch.testing.assert_close(out, method.linear(x, packed, None, REFERENCE))
