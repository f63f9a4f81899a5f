"""Rotary embedding of queries and keys in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmkit.jit.rehearsal import launch


@triton.jit
def _turn(row_ptr, cos, sin, heads, head_size, half, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    column = tl.arange(0, BLOCK_D)
    for start in range(0, heads, BLOCK_H):
        head = start + tl.arange(0, BLOCK_H)
        inside = (head < heads)[:, None] & (column < half)[None, :]
        place = row_ptr + head[:, None] * head_size + column[None, :]
        first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(place + half, mask=inside, other=0.0).to(tl.float32)
        kind = row_ptr.dtype.element_ty
        tl.store(place, (first * cos[None, :] - second * sin[None, :]).to(kind), mask=inside)
        tl.store(place + half, (second * cos[None, :] + first * sin[None, :]).to(kind), mask=inside)


@triton.jit
def rotary_kernel(
    positions_ptr, query_ptr, key_ptr, table_ptr, query_stride, key_stride, heads, kv_heads, head_size, half,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: all heads of one token. table float32 [positions, 2 * half]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    entry = table_ptr + tl.load(positions_ptr + token) * 2 * half + column
    cos = tl.load(entry, mask=column < half, other=0.0)
    sin = tl.load(entry + half, mask=column < half, other=0.0)
    _turn(query_ptr + token * query_stride, cos, sin, heads, head_size, half, BLOCK_H, BLOCK_D)
    _turn(key_ptr + token * key_stride, cos, sin, kv_heads, head_size, half, BLOCK_H, BLOCK_D)


def rotary(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor, head_size: int
) -> None:
    """In place; see `KernelTable.rotary`. The rows of query and key and all of cos_sin are dense."""
    if not len(positions):
        return
    half = cos_sin.shape[-1] // 2
    heads, kv_heads = query.shape[-1] // head_size, key.shape[-1] // head_size
    launch(
        rotary_kernel, (len(positions),),
        positions, query, key, cos_sin, query.stride(0), key.stride(0), heads, kv_heads, head_size, half,
        BLOCK_H=min(32, triton.next_power_of_2(heads)), BLOCK_D=triton.next_power_of_2(half), num_warps=4,
    )  # fmt: skip
