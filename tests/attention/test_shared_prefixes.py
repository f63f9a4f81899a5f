"""Decoding rows that begin with the same pages: who is found, and that attention is the same for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llmkit_attention import cpu_kernels
from llmkit_attention.cpu_prefixes import SharedPrefixes, shared_prefixes

PAGE = 16


def tables(*rows: list[int]) -> np.ndarray:
    width = max(map(len, rows))
    return np.array([row + [999] * (width - len(row)) for row in rows], dtype=np.int32)


def found(
    table: np.ndarray, seq_lens: list[int], query_lens: list[int] | None = None, most: int = 32, threads: int = 1
) -> SharedPrefixes | None:
    return shared_prefixes(
        table,
        np.array(query_lens or [1] * len(table)),
        np.array(seq_lens),
        PAGE,
        block=64,
        num_kv_heads=3,
        most_sequences=most,
        threads=threads,
    )


PREFIX = list(range(100, 110))  # 160 tokens


def test_rows_with_one_beginning_are_found_among_others() -> None:
    table = tables(*[[*PREFIX, i] if i % 2 else [i, i + 1] for i in range(10)])
    prefixes = found(table, [170 if i % 2 else 20 for i in range(10)])
    assert prefixes is not None
    assert prefixes.parts.tolist() == [[0, 5, 128]]  # whole blocks of 64
    assert prefixes.members.tolist() == [1, 3, 5, 7, 9]
    assert prefixes.grouped.tolist() == [0, 1] * 5


def test_every_member_keeps_a_key_of_its_own() -> None:
    table = tables(*[PREFIX[:8]] * 4)
    assert found(table, [128] * 4) is None
    prefixes = found(tables(*[PREFIX] * 4), [160, 160, 160, 129])
    assert prefixes is not None
    assert prefixes.parts.tolist() == [[0, 4, 128]]


@pytest.mark.parametrize(
    ("table", "seq_lens", "query_lens"),
    [
        (tables(*[PREFIX] * 3), [160] * 3, None),
        (tables(*[PREFIX] * 4), [160] * 4, [1, 1, 1, 2]),
        (tables(*[[i, *PREFIX] for i in range(6)]), [170] * 6, None),
        (tables(*[[*PREFIX[:7], i] for i in range(6)]), [120] * 6, None),
    ],
    ids=["few", "not decoding", "another beginning", "short"],
)
def test_what_is_not_worth_it_is_left_alone(
    table: np.ndarray, seq_lens: list[int], query_lens: list[int] | None
) -> None:
    assert found(table, seq_lens, query_lens) is None


def test_a_group_is_dealt_out_to_the_threads() -> None:
    table = tables(*[[*PREFIX, i] for i in range(40)])
    alone, four = found(table, [170] * 40), found(table, [170] * 40, threads=4)
    assert alone is not None
    assert four is not None
    assert alone.parts[:, 1].tolist() == [32, 8]
    assert four.parts[:, 1].tolist() == [10, 10, 10, 10]
    assert sorted(four.members.tolist()) == list(range(40))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "group", "size", "cap"), [(3, 3, 64, 0.0), (1, 8, 80, 4.0), (2, 1, 128, 0.0)])
def test_attention_is_the_same(dtype: torch.dtype, heads: int, group: int, size: int, cap: float) -> None:
    torch.manual_seed(heads + size)
    rows, shared = 11, 192
    lens = torch.randint(shared + 1, shared + 90, (rows,), dtype=torch.int32)
    lens[4] = 70  # a row that has nothing in common with the others
    pages = torch.randperm(rows * 18, dtype=torch.int32)
    table = pages.view(rows, 18).contiguous()
    table[[row for row in range(rows) if row != 4], : shared // PAGE] = table[0, : shared // PAGE]
    kv = torch.full((rows * 18, 2, heads, PAGE, size), torch.nan, dtype=dtype)  # what nobody wrote must not be seen
    for row in range(rows):
        keys = torch.arange(int(lens[row]))
        kv[table[row, keys // PAGE].long(), :, :, keys % PAGE] = torch.randn(len(keys), 2, heads, size).to(dtype)
    query = torch.randn(rows, heads * group, size)
    starts = torch.arange(rows + 1, dtype=torch.int32)
    prefixes = found(table.numpy(), lens.tolist(), most=4)
    assert prefixes is not None
    assert prefixes.parts[:, 2].tolist() == [192, 192, 192]
    plain, together = torch.empty_like(query), torch.empty_like(query)
    arguments = (query, kv, table, starts, lens, size**-0.5, 0, cap)
    cpu_kernels.paged_attention(*arguments, plain)
    cpu_kernels.paged_attention(*arguments, together, prefixes)
    torch.testing.assert_close(together, plain, rtol=1e-5, atol=1e-5)
    assert together.isfinite().all()
