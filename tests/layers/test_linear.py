"""Linear layers: shards, quantization, and the same product on any number of workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmkit.errors import ModelError
from llmkit.hookspecs.kernels import KernelTable
from llmkit.hookspecs.quantization import QuantizationMethod
from llmkit.layers.context import ModelContext, ParallelLayout
from llmkit.layers.linear import (
    ColumnParallelLinear,
    Linear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from llmkit.layers.weight_loader import load_into

Make = Callable[..., ModelContext]


class Halving(QuantizationMethod):
    """Packs a weight into bfloat16 and writes down what it was given; leaves widths in `skip` alone."""

    def __init__(self, skip: tuple[int, ...] = ()) -> None:
        self.packed: list[tuple[tuple[int, ...], str]] = []
        self.skip = skip

    def pack(self, weight: torch.Tensor, role: str) -> Any | None:
        self.packed.append((tuple(weight.shape), role))
        return None if weight.shape[1] in self.skip else weight.bfloat16()

    def linear(self, x: torch.Tensor, packed: Any, bias: torch.Tensor | None, kernels: KernelTable) -> torch.Tensor:
        return kernels.linear(x, packed.float(), bias)

    def embedding(self, ids: torch.Tensor, packed: Any, dtype: torch.dtype) -> torch.Tensor:
        rows: torch.Tensor = packed[ids].to(dtype)
        return rows

    def nbytes(self, n: int, k: int, role: str, dtype: torch.dtype) -> int:  # noqa: ARG002
        return n * k * (dtype.itemsize if k in self.skip else 2)


def filled(layer: Linear, tensors: dict[str, torch.Tensor]) -> Linear:
    holder = torch.nn.Module()
    block = torch.nn.Module()
    block.add_module("projection", layer)
    holder.add_module("block", block)
    load_into(holder, tensors.items())
    return layer


def workers(count: int) -> list[ParallelLayout]:
    return [ParallelLayout(r, count, all_reduce=lambda x: x, all_gather=lambda x: x) for r in range(count)]


def test_plain_layer(make_context: Make) -> None:
    weight, bias, x = torch.randn(6, 4), torch.randn(6), torch.randn(3, 4)
    layer = filled(
        Linear(make_context(), 4, 6, bias=True), {"block.projection.weight": weight, "block.projection.bias": bias}
    )
    torch.testing.assert_close(layer(x), x @ weight.T + bias)
    assert layer.parameter_bytes() == 4 * (6 * 4 + 6)


def test_nothing_is_allocated_before_weights_arrive(make_context: Make) -> None:
    layer = Linear(make_context(device=torch.device("meta")), 10**6, 10**6, bias=True)
    assert layer.weight.plain is None
    assert layer.parameter_bytes() == 4 * (10**12 + 10**6)


@pytest.mark.parametrize("world", [1, 2])
def test_a_fused_tensor_is_dealt_out_like_its_parts(make_context: Make, world: int) -> None:
    parts = {name: torch.randn(n, 4) for name, n in (("q_proj", 8), ("k_proj", 4), ("v_proj", 4))}
    biases = {name: torch.randn(len(weight)) for name, weight in parts.items()}
    separate = {f"block.{n}.weight": w for n, w in parts.items()} | {f"block.{n}.bias": b for n, b in biases.items()}
    together = {
        "block.projection.weight": torch.cat(tuple(parts.values())),
        "block.projection.bias": torch.cat(tuple(biases.values())),
    }
    x = torch.randn(3, 4)
    for layout in workers(world):
        context = make_context(parallel=layout)
        expected = filled(QKVParallelLinear(context, 4, 2, 4, 2, bias=True), separate).forward(x)
        fused = filled(QKVParallelLinear(context, 4, 2, 4, 2, bias=True, fused=True), together)
        assert torch.equal(fused.forward(x), expected)
    assert fused.parameter_bytes() * world == 4 * 16 * 5
    with pytest.raises(ModelError, match=r"block\.projection\.weight has the shape \[15, 4\].*\[16, 4\]"):
        filled(fused, {"block.projection.weight": torch.zeros(15, 4)})


def test_a_merged_layer_is_packed_once_when_its_last_shard_has_come(make_context: Make) -> None:
    method = Halving()
    layer = MergedColumnParallelLinear(make_context(quantization=method), 4, {"gate": 3, "up": 5})
    slots = dict(layer.weight_slots("mlp.gate_up"))
    assert {name: slot.shape for name, slot in slots.items()} == {"mlp.gate.weight": (3, 4), "mlp.up.weight": (5, 4)}
    gate, up, x = torch.randn(3, 4), torch.randn(5, 4), torch.randn(2, 4)
    slots["mlp.up.weight"].load(up)
    assert method.packed == []
    slots["mlp.gate.weight"].load(gate)
    assert method.packed == [((8, 4), "linear")]
    assert layer.weight.plain is None
    torch.testing.assert_close(layer(x), x @ torch.cat((gate, up)).T, rtol=2e-2, atol=2e-2)


def test_a_weight_that_the_method_leaves_alone_stays_plain(make_context: Make) -> None:
    layer = filled(
        Linear(make_context(quantization=Halving(skip=(4,))), 4, 6), {"block.projection.weight": torch.ones(6, 4)}
    )
    assert layer.weight.packed is None
    assert layer(torch.ones(1, 4)).tolist() == [[4.0] * 6]
    assert layer.parameter_bytes() == 4 * 24


def test_weights_are_cast_and_do_not_alias_the_reader(make_context: Make) -> None:
    weight = torch.ones(6, 4, dtype=torch.float16)
    layer = filled(Linear(make_context(dtype=torch.bfloat16), 4, 6), {"block.projection.weight": weight})
    weight.zero_()
    assert layer.weight.plain is not None
    assert layer.weight.plain.dtype is torch.bfloat16
    assert layer.weight.plain.sum() == 24


@pytest.mark.parametrize("count", [1, 2, 4])
def test_column_then_row_adds_up_to_the_whole(make_context: Make, count: int) -> None:
    first, first_bias, second, second_bias = torch.randn(8, 6), torch.randn(8), torch.randn(5, 8), torch.randn(5)
    x = torch.randn(3, 6)
    total = torch.zeros(3, 5)
    for parallel in workers(count):
        context = make_context(parallel=parallel)
        column = filled(
            ColumnParallelLinear(context, 6, 8, bias=True),
            {"block.projection.weight": first, "block.projection.bias": first_bias},
        )
        row = filled(
            RowParallelLinear(context, 8, 5, bias=True),
            {"block.projection.weight": second, "block.projection.bias": second_bias},
        )
        assert column.weight.shape == (8 // count, 6)
        assert row.weight.shape == (5, 8 // count)
        total += row(column(x))
    torch.testing.assert_close(total, (x @ first.T + first_bias) @ second.T + second_bias)


@pytest.mark.parametrize(("count", "heads", "kv_heads"), [(1, 4, 2), (2, 4, 2), (4, 4, 2), (4, 8, 1)])
def test_heads_are_dealt_out_whole(make_context: Make, count: int, heads: int, kv_heads: int) -> None:
    size, hidden = 3, 5
    names = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    tensors = {f"block.{name}.weight": torch.randn(n * size, hidden) for name, n in names.items()}
    tensors |= {f"block.{name}.bias": torch.randn(n * size) for name, n in names.items()}
    x = torch.randn(2, hidden)
    for parallel in workers(count):
        layer = QKVParallelLinear(make_context(parallel=parallel), hidden, size, heads, kv_heads, bias=True)
        filled(layer, tensors)
        assert (layer.num_heads, layer.num_kv_heads) == (heads // count, max(1, kv_heads // count))
        parts = torch.split(layer(x), layer.split_sizes, dim=-1)
        first_kv = parallel.rank * kv_heads // count
        firsts = {"q_proj": parallel.rank * heads // count, "k_proj": first_kv, "v_proj": first_kv}
        for part, (name, first) in zip(parts, firsts.items(), strict=True):
            rows = slice(first * size, first * size + part.shape[1])
            expected = x @ tensors[f"block.{name}.weight"][rows].T + tensors[f"block.{name}.bias"][rows]
            torch.testing.assert_close(part, expected)


def test_sizes_that_do_not_divide_are_refused(make_context: Make) -> None:
    two, three = workers(2)[0], workers(3)[0]
    with pytest.raises(ModelError, match="output of 7 cannot be split evenly over 2"):
        ColumnParallelLinear(make_context(parallel=two), 4, 7)
    with pytest.raises(ModelError, match="input of 7"):
        RowParallelLinear(make_context(parallel=two), 7, 4)
    with pytest.raises(ModelError, match="2 KV heads cannot be shared evenly by 3"):
        QKVParallelLinear(make_context(parallel=three), 4, 2, 6, 2)
