"""The `triton` kernel table against the reference: norms, rotary embedding and the write to the cache, activations. See
`triton_cases.py`."""

from __future__ import annotations

import pytest
import torch
from triton_cases import DEVICE, DTYPES, INTERPRETED, REFERENCE, assert_close, kernels, random

from llmkit.hookspecs.kernels import HeadNorms

pytest.importorskip("triton")


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
