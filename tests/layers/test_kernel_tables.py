"""The kernel tables against plain formulas in float64, contiguous and not, in every type."""

from __future__ import annotations

import importlib

import pytest
import torch

from llmkit.hookspecs import Environment
from llmkit.hookspecs.kernels import KernelTable

FRONT_DOORS = ["llmkit_kernels.torch_reference", "llmkit_kernels.cpu"]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.fixture(params=FRONT_DOORS)
def table(request: pytest.FixtureRequest) -> KernelTable:
    built: KernelTable = importlib.import_module(request.param).llmkit_kernels()
    return built


@pytest.fixture(params=list(TOLERANCE), ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype is dtype
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("t", "n", "k"), [(1, 64, 48), (5, 33, 64), (100, 48, 96), (3, 7, 5)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(table: KernelTable, dtype: torch.dtype, t: int, n: int, k: int, bias: bool) -> None:
    x, weight = torch.randn(t, k).to(dtype), (torch.randn(n, k) / k**0.5).to(dtype)
    b = torch.randn(n).to(dtype) if bias else None
    expected = x.double() @ weight.double().T + (0 if b is None else b.double())
    assert_close(table.linear(x, weight, b), expected, dtype)


def test_embedding(table: KernelTable, dtype: torch.dtype) -> None:
    weight, ids = torch.randn(9, 8).to(dtype), torch.tensor([8, 0, 0, 3])
    assert torch.equal(table.embedding(ids, weight), weight[ids])


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("shape", [(3, 64), (200, 576), (2, 5, 16), (4, 10)])
def test_rms_norm(table: KernelTable, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    assert_close(table.rms_norm(x, weight, 1e-2), rms(x, weight, 1e-2), dtype)


def test_norms_with_a_float32_weight_round_once(table: KernelTable, dtype: torch.dtype) -> None:
    """1 + w, as some models have it: rounding the weight to the model's type too would show in the result."""
    x, residual, weight = torch.randn(5, 64).to(dtype), torch.randn(5, 64).to(dtype), 1 + torch.randn(64) / 100
    once = rms(x, weight, 1e-2).to(dtype).double()
    steps = 4 if dtype is torch.float32 else 1  # float32 is also what it computes in: a rounding in each of its steps
    bound = steps * torch.finfo(dtype).eps * once.abs().max()
    assert (table.rms_norm(x, weight, 1e-2).double() - once).abs().max() <= bound
    normed, total = table.add_rms_norm(x.clone(), residual.clone(), weight, 1e-2)
    assert_close(total, x.double() + residual.double(), dtype)
    assert_close(normed, rms(total, weight, 1e-2), dtype)


def test_rms_norm_of_heads_inside_a_wider_row(table: KernelTable, dtype: torch.dtype) -> None:
    x = torch.randn(6, 200).to(dtype)[:, 8:136].view(6, -1, 32)
    weight = torch.randn(32).to(dtype)
    assert_close(table.rms_norm(x, weight, 1e-6), rms(x, weight, 1e-6), dtype)


@pytest.mark.parametrize("shape", [(3, 64), (200, 576), (4, 10)])
def test_add_rms_norm(table: KernelTable, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, residual, weight = (torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype))
    total = (x + residual).double()
    normed, new_residual = table.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert_close(new_residual, total, dtype)
    assert_close(normed, rms(total, weight, 1e-5), dtype)


@pytest.mark.parametrize(("head_size", "rotary_dim"), [(64, 64), (32, 16), (20, 20), (128, 128)])
@pytest.mark.parametrize("strided", [False, True])
def test_rotary(table: KernelTable, dtype: torch.dtype, head_size: int, rotary_dim: int, strided: bool) -> None:
    tokens, heads, kv_heads = 7, 6, 2
    row = torch.randn(tokens, (heads + 2 * kv_heads) * head_size).to(dtype)
    query, key, value = torch.split(row, [heads * head_size, kv_heads * head_size, kv_heads * head_size], dim=-1)
    before = row.clone()
    if not strided:
        query, key = query.contiguous(), key.contiguous()
    angles = torch.rand(50, rotary_dim // 2) * 6
    table_of = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.tensor([0, 49, 7, 7, 3, 20, 1])
    old_query, old_key = query.clone(), key.clone()
    table.rotary(positions, query, key, table_of, head_size)
    for new, old in ((query, old_query), (key, old_key)):
        parts = old.double().view(tokens, -1, head_size)
        a, b, rest = torch.split(parts, [rotary_dim // 2, rotary_dim // 2, head_size - rotary_dim], dim=-1)
        cos, sin = (f(angles[positions].double())[:, None] for f in (torch.cos, torch.sin))
        expected = torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1).flatten(1)
        assert_close(new, expected, dtype)
    if strided:
        assert torch.equal(value, before[:, -kv_heads * head_size :])
        assert not torch.equal(row, before)


@pytest.mark.parametrize("shape", [(3, 64), (130, 512), (4, 10)])
def test_gated_activations(table: KernelTable, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gate_up = torch.randn(shape).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    assert_close(table.silu_and_mul(gate_up), gate * gate.sigmoid() * up, dtype)
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    assert_close(table.gelu_tanh_and_mul(gate_up), 0.5 * gate * (1 + inner.tanh()) * up, dtype)


def test_the_cpu_table_wins_on_the_cpu_only() -> None:
    reference, cpu = (importlib.import_module(name) for name in FRONT_DOORS)
    assert cpu.info.rank > reference.info.rank
    assert cpu.llmkit_problems(Environment(device_type="cpu")) == []
    assert any("needs the CPU" in p for p in cpu.llmkit_problems(Environment(device_type="cuda")))
