"""The CPU kernels against plain torch in float64 on random inputs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmkit.mapped_memory import MappedMemory
from llmkit_attention import cpu_cache, cpu_kernels
from llmkit_kernels import cpu_fused, cpu_linear, cpu_panels
from llmkit_kernels.cpu_table import CPUKernels
from llmkit_quantization import cpu_coded, cpu_int4, cpu_int8, cpu_packed
from llmkit_quantization.cpu_packed import Packed


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.isfinite().all()
    return float((actual.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(("n", "k"), [(192, 576), (577, 1536), (3, 70), (64, 7), (1, 33)])
@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 31, 64, 65])
def test_linear(m: int, n: int, k: int) -> None:
    torch.manual_seed(m * n + k)
    x, weight, bias = torch.randn(m, k), torch.randn(n, k), torch.randn(n)
    expected = x.double() @ weight.double().T
    assert relative_error(cpu_linear.linear(x, weight), expected) < 1e-5
    assert relative_error(cpu_linear.linear(x, weight, bias), expected + bias) < 1e-5
    strided = torch.cat((x, x), 1)[:, :k]
    assert torch.equal(cpu_linear.linear(strided, weight), cpu_linear.linear(x, weight))


def test_linear_of_other_dtypes_is_torchs() -> None:
    x, weight = torch.randn(3, 32, dtype=torch.bfloat16), torch.randn(5, 32, dtype=torch.bfloat16)
    assert torch.equal(cpu_linear.linear(x, weight), torch.nn.functional.linear(x, weight))


def test_linear_does_not_depend_on_the_number_of_threads() -> None:
    x, weight = torch.randn(5, 576), torch.randn(1536, 576)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(cpu_linear.linear(x, weight))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def arranged(weight: torch.Tensor) -> cpu_panels.PanelWeight:
    panels = CPUKernels().arrange(weight, "linear")
    assert panels is not None
    return panels


@pytest.mark.parametrize(("n", "k"), [(64, 4), (576, 576), (960, 100), (192, 1536)])
def test_linear_in_panels(n: int, k: int) -> None:
    torch.manual_seed(n + k)
    table, weight, bias = CPUKernels(), torch.randn(n, k), torch.randn(n)
    panels = arranged(weight)
    for m in (1, 2, 3, 5, 6, 7, 11, 13, 32, 65, 300):
        x = torch.randn(m, k)
        expected = x.double() @ weight.double().T
        assert relative_error(table.arranged_linear(x, panels), expected) < 1e-5
        assert relative_error(table.arranged_linear(x, panels, bias), expected + bias) < 1e-5


def test_a_row_in_panels_does_not_depend_on_the_rows_beside_it_nor_on_threads() -> None:
    x, panels = torch.randn(130, 576), arranged(torch.randn(960, 576))
    before = torch.get_num_threads()
    whole = cpu_panels.linear(x, panels)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for first, last in ((0, 1), (3, 5), (7, 14), (20, 130)):
                assert torch.equal(cpu_panels.linear(x[first:last], panels), whole[first:last])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "weight",
    [torch.zeros(63, 64), torch.zeros(64, 7), torch.zeros(0, 64), torch.zeros(64, 64, dtype=torch.bfloat16)],
    ids=["rows", "columns", "empty", "type"],
)
def test_what_does_not_fit_in_panels_is_kept_as_it_is(weight: torch.Tensor) -> None:
    assert CPUKernels().arrange(weight, "linear") is None


@pytest.mark.parametrize(("quantize", "spread"), [(cpu_int4.quantize, 0.09), (cpu_int8.quantize, 0.006)])
@pytest.mark.parametrize(("n", "k"), [(192, 576), (577, 1536), (7, 32), (33, 70), (1, 5)])
def test_quantization(quantize: Callable[[torch.Tensor, MappedMemory], Packed], spread: float, n: int, k: int) -> None:
    torch.manual_seed(n + k)
    weight = torch.randn(n, k)
    packed = quantize(weight, MappedMemory())
    decoded = cpu_packed.dequantize(packed)
    assert packed.shape == (n, k)
    assert float((decoded - weight).norm() / weight.norm()) < spread
    assert torch.equal(cpu_packed.dequantize(quantize(decoded, MappedMemory())), decoded)
    ids = torch.randint(0, n, (2, 3))
    assert torch.equal(cpu_packed.embedding(ids, packed), decoded[ids])
    with pytest.raises(IndexError):
        cpu_packed.embedding(torch.tensor([n]), packed)
    for m in (1, 2, 3, 4, 5, 7, 13, 17, 64, 65, 500):
        x, bias = torch.randn(m, k), torch.randn(n)
        expected = x.double() @ decoded.double().T
        scale = float(x.norm() * decoded.norm()) / k**0.5  # the usual size of the product; a short one may cancel
        limit = 4e-5 * scale
        assert float((cpu_packed.linear(x, packed) - expected).norm()) < limit
        assert float((cpu_packed.linear(x, packed, bias) - expected - bias).norm()) < limit


@pytest.mark.parametrize("quantize", [cpu_int4.quantize, cpu_int8.quantize])
def test_a_row_times_codes_does_not_depend_on_the_rows_beside_it_nor_on_threads(
    quantize: Callable[[torch.Tensor, MappedMemory], Packed],
) -> None:
    x = torch.randn(700, 1536) * torch.rand(1536).mul(9).exp()
    packed, bias = quantize(torch.randn(70, 1536), MappedMemory()), torch.randn(70)
    whole = cpu_packed.linear(x, packed, bias)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for first, last in ((0, 1), (3, 5), (7, 14), (20, 130), (299, 700)):
                assert torch.equal(cpu_packed.linear(x[first:last], packed, bias), whole[first:last])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("quantize", [cpu_int4.quantize, cpu_int8.quantize])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows_in_its_row_alone(
    quantize: Callable[[torch.Tensor, MappedMemory], Packed], value: float
) -> None:
    x, packed = torch.randn(5, 96), quantize(torch.randn(40, 96), MappedMemory())
    x[2, 50] = value
    y = cpu_packed.linear(x, packed)
    assert not y[2].isfinite().any()
    assert torch.equal(y[[0, 1, 3, 4]], cpu_packed.linear(x[[0, 1, 3, 4]], packed))


def test_integer_dots_are_one_instruction_where_the_processor_has_it() -> None:
    from numba import cfunc, types
    from numba.core.codegen import get_host_cpu_features

    if "+avx512vnni" not in get_host_cpu_features().split(","):
        pytest.skip("no AVX-512 VNNI")
    cpu_coded.load()
    tile = cpu_coded.coded_tile

    def kernel(args: Any) -> None:
        tile(4, args[0], args[1], args[2], args[3], args[4], args[5], args[6], args[7])

    code = cfunc(types.void(types.CPointer(types.int64)))(kernel)._library.get_asm_str()
    assert code.count("vpdpwssd") > 10 * code.count("vpmaddwd")


def test_products_with_codes_take_any_size() -> None:
    """A large element beside small ones, numbers near the ends of float32, and nothing but zeros."""
    torch.manual_seed(6)
    packed = cpu_int4.quantize(torch.randn(48, 64), MappedMemory())
    decoded = cpu_packed.dequantize(packed).double()
    x = torch.randn(6, 64)
    x[0, 7], x[3] = 1e4, 0.0
    x[1] *= 1e-28
    x[2] *= 1e30
    y = cpu_packed.linear(x, packed)
    for row, product in zip(x.double(), y, strict=True):
        assert float((product - row @ decoded.T).norm()) <= 1e-4 * float(row.norm() * decoded.norm()) / 8


def test_int4_keeps_a_q4_1_weight() -> None:
    torch.manual_seed(4)
    scales, minima = (torch.randn(50, 6).mul(0.01).half().float() for _ in range(2))
    scales = scales.abs() + 0.001
    codes = torch.randint(0, 16, (50, 6, 32))
    codes[..., 3], codes[..., 30] = 0, 15  # a Q4_1 group always has both ends
    weight = (codes * scales.half().float()[..., None] + minima[..., None]).flatten(1)
    assert float((cpu_packed.dequantize(cpu_int4.quantize(weight, MappedMemory())) - weight).abs().max()) < 1e-7


@pytest.mark.parametrize("num_steps", range(1, 16))
def test_int4_keeps_any_grid_of_up_to_16_values(num_steps: int) -> None:
    """Of a Q4_0 group, and of a Q4_1 group that was made to suit its most important weights, not all codes occur."""
    torch.manual_seed(num_steps)
    scales = (torch.rand(50, 6, 1) * 0.05 + 0.001).half().float()
    first = torch.randint(-8, 8 - num_steps + 1, (50, 6, 1))
    codes = first + torch.randint(0, num_steps + 1, (50, 6, 32))
    codes[..., 3], codes[..., 30] = first[..., 0], first[..., 0] + num_steps
    weight = scales * codes
    decoded = cpu_packed.dequantize(cpu_int4.quantize(weight.flatten(1), MappedMemory())).view_as(weight)
    assert float(((decoded - weight) / scales).abs().max()) < (8 + num_steps) * 2**-11  # minimum and scale in float16


@pytest.mark.parametrize("tokens", [1, 5, 33, 200])
@pytest.mark.parametrize("dim", [64, 576, 80, 50])
def test_norms_and_activation(tokens: int, dim: int) -> None:
    torch.manual_seed(tokens + dim)
    x, residual, weight = torch.randn(tokens, dim), torch.randn(tokens, dim), torch.randn(dim)

    def norm(value: torch.Tensor) -> torch.Tensor:
        return value / (value.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    assert relative_error(cpu_fused.rms_norm(x, weight, 1e-5), norm(x.double())) < 1e-6
    normed, total = cpu_fused.fused_add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert relative_error(normed, norm(total.double())) < 1e-6
    gate_up = torch.randn(tokens, 2 * dim) * 20
    gate, up = gate_up.double().chunk(2, -1)
    assert relative_error(cpu_fused.silu_and_mul(gate_up), torch.nn.functional.silu(gate) * up) < 1e-6


@pytest.mark.parametrize("tokens", [1, 7, 130])
@pytest.mark.parametrize("head_size", [64, 80, 6])
def test_rotary(tokens: int, head_size: int) -> None:
    torch.manual_seed(tokens + head_size)
    angles = torch.randn(300, head_size // 2, dtype=torch.float64)
    cache = torch.cat((angles.cos(), angles.sin()), 1).float()
    positions = torch.randint(0, 300, (tokens,))
    q, k = torch.randn(tokens, 9 * head_size), torch.randn(tokens, 3 * head_size)
    expected = []
    for x in (q, k):
        first, second = x.double().unflatten(1, (-1, head_size)).chunk(2, -1)
        cosine, sine = cache.double()[positions][:, None].chunk(2, -1)
        expected.append(torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1).flatten(1))
    wide = torch.cat((q, k), 1)
    cpu_fused.rotary(positions, q, k, cache, head_size)
    assert relative_error(q, expected[0]) < 1e-6
    assert relative_error(k, expected[1]) < 1e-6
    views = wide[:, : q.shape[1]], wide[:, q.shape[1] :]
    cpu_fused.rotary(positions, *views, cache, head_size)
    assert relative_error(views[0], expected[0]) < 1e-6
    assert relative_error(views[1], expected[1]) < 1e-6


def paged_batch(queries: list[int], lengths: list[int], page_size: int) -> dict[str, torch.Tensor]:
    """Block tables with pages in random order, and the slots of this step's tokens."""
    counts = [-(-length // page_size) for length in lengths]
    pages = torch.randperm(sum(counts) + 2, dtype=torch.int32)
    table = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32)
    for row, part in zip(table, pages.split([*counts, 2]), strict=False):
        row[: len(part)] = part
    slots = [
        int(row[p // page_size]) * page_size + p % page_size
        for row, count, length in zip(table, queries, lengths, strict=True)
        for p in range(length - count, length)
    ]
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    return {"table": table, "starts": starts, "lens": torch.tensor(lengths).int(), "slots": torch.tensor(slots)}


def reference_attention(
    q: torch.Tensor, kv: torch.Tensor, batch: dict[str, torch.Tensor], scale: float, window: int, cap: float
) -> torch.Tensor:
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i, length in enumerate(batch["lens"].tolist()):
        a, b = batch["starts"][i : i + 2].tolist()
        pages = batch["table"][i, : -(-length // kv.shape[3])].long()
        group = q.shape[1] // kv.shape[2]
        both = (kv[pages, part].transpose(0, 1).flatten(1, 2)[:, :length].double() for part in (0, 1))
        keys, values = (part.repeat_interleave(group, 0) for part in both)
        scores = torch.einsum("qhd,hkd->hqk", q[a:b].double(), keys) * scale
        scores = cap * torch.tanh(scores / cap) if cap else scores
        at, key = torch.arange(length - (b - a), length)[:, None], torch.arange(length)[None]
        seen = (key <= at) & (key > at - window if window else key >= 0)
        out[a:b] = torch.einsum("hqk,hkd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)
    return out


@pytest.mark.parametrize(("heads", "group"), [(3, 3), (2, 1), (2, 4), (1, 8), (1, 7)])
@pytest.mark.parametrize("head_size", [64, 80, 128])
@pytest.mark.parametrize(
    ("page_size", "window", "cap"), [(16, 0, 0.0), (16, 37, 0.0), (1, 0, 20.0), (4, 5, 3.0), (128, 37, 0.0)]
)
def test_paged_attention(heads: int, group: int, head_size: int, page_size: int, window: int, cap: float) -> None:
    torch.manual_seed(heads * group + head_size + page_size + window)
    batch = paged_batch([1, 1, 50, 1, 7, 130, 0, 1], [1, 300, 50, 77, 100, 200, 10, 64], page_size)
    tokens = int(batch["starts"][-1])
    kv = torch.randn(int(batch["table"].max()) + 3, 2, heads, page_size, head_size)
    q = torch.randn(tokens, heads * group, head_size)
    out = torch.full_like(q, torch.nan)
    scale = head_size**-0.5
    expected = reference_attention(q, kv, batch, scale, window, cap)
    places = batch["table"], batch["starts"], batch["lens"]
    cpu_kernels.paged_attention(q, kv, *places, scale, window, cap, out)
    assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("page_size", "window", "cap"), [(16, 0, 0.0), (8, 37, 3.0), (1, 0, 0.0), (64, 0, 20.0)])
def test_a_token_attends_alone_as_in_a_prompt_to_the_bit(
    page_size: int, window: int, cap: float, dtype: torch.dtype
) -> None:
    """However a prompt is cut into chunks, and whether a token is the last of one or decodes."""
    length, group = 203, 3
    torch.manual_seed(page_size + window)
    batch = paged_batch([length], [length], page_size)
    kv = torch.randn(int(batch["table"].max()) + 1, 2, 2, page_size, 64).to(dtype)
    q = torch.randn(length, 2 * group, 64)
    whole = torch.empty_like(q)
    cpu_kernels.paged_attention(
        q, kv, *(batch[name] for name in ("table", "starts", "lens")), 0.125, window, cap, whole
    )
    for count in (1, 2, 50):
        for last in (*range(count, length, 13), length):
            part = q[last - count : last].contiguous()
            out = torch.empty_like(part)
            starts, lens = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, count], [last]))
            cpu_kernels.paged_attention(part, kv, batch["table"], starts, lens, 0.125, window, cap, out)
            assert torch.equal(out, whole[last - count : last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [16, 1])
def test_write_then_attend(dtype: torch.dtype, page_size: int) -> None:
    torch.manual_seed(page_size)
    batch = paged_batch([1, 40, 1], [33, 90, 1], page_size)
    tokens = int(batch["starts"][-1])
    kv = torch.randn(int(batch["table"].max()) + 3, 2, 3, page_size, 64).to(dtype)
    k, v, q = (torch.randn(tokens, heads, 64) for heads in (3, 3, 9))
    slots = batch["slots"].clone()
    slots[4] = -1
    wanted = kv.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            wanted[slot // page_size, 0, :, slot % page_size] = k[row].to(dtype)
            wanted[slot // page_size, 1, :, slot % page_size] = v[row].to(dtype)
    cpu_cache.write_kv(k, v, kv, slots)
    assert torch.equal(kv, wanted)
    out = torch.empty_like(q)
    cpu_kernels.paged_attention(q, kv, batch["table"], batch["starts"], batch["lens"], 0.125, 0, 0.0, out)
    assert relative_error(out, reference_attention(q, kv, batch, 0.125, 0, 0.0)) < 1e-5


def test_attention_refuses_what_it_cannot_do() -> None:
    batch = paged_batch([1], [5], 3)
    q, kv = torch.randn(1, 4, 24), torch.randn(9, 2, 3, 3, 24)
    places = batch["table"], batch["starts"], batch["lens"]
    with pytest.raises(ValueError, match=r"head size 24.*page size 3.*4 query heads"):
        cpu_kernels.paged_attention(q, kv, *places, 1.0, 0, 0.0, q.clone())


def test_import_does_not_import_numba() -> None:
    modules = "llmkit_attention.cpu_kernels, llmkit_kernels.cpu_fused, llmkit_quantization.cpu_int8"
    code = f"import sys, {modules}; print('numba' in sys.modules)"
    paths = f"import sys; sys.path[:0] = {[p for p in sys.path if p]!r}; "
    done = subprocess.run([sys.executable, "-c", paths + code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_rows_may_be_slices_of_a_wider_tensor() -> None:
    """q, k and v as they come out of one merged projection give what contiguous copies give, to the bit."""
    torch.manual_seed(5)
    heads, kv_heads, d, page_size = 6, 2, 64, 16
    batch = paged_batch([1, 37, 1], [40, 50, 9], page_size)
    tokens = int(batch["starts"][-1])
    merged = torch.randn(tokens, (heads + 2 * kv_heads) * d)
    parts = merged.split([heads * d, kv_heads * d, kv_heads * d], 1)
    q, k, v = (part.view(tokens, -1, d) for part in parts)
    pages = int(batch["table"].max()) + 1
    results = []
    for rows in ((q, k, v), tuple(part.contiguous() for part in (q, k, v))):
        kv = torch.zeros(pages, 2, kv_heads, page_size, d)
        cpu_cache.write_kv(rows[1], rows[2], kv, batch["slots"])
        out = torch.empty(tokens, heads, d)
        cpu_kernels.paged_attention(rows[0], kv, batch["table"], batch["starts"], batch["lens"], d**-0.5, 0, 0.0, out)
        results.append((kv, out))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
