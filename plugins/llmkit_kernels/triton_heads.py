"""What happens to the heads of queries, keys and values between their projection and attention, in one launch: norms,
rotary embedding, the write to the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmkit.hookspecs.kernels import HeadNorms
from llmkit.jit.chain import follows_early, next_may_start, wait_for_last
from llmkit.jit.rehearsal import launch

_ELEMENTS = 1024  # of a program
_FEW_TOKENS = 32  # up to which a program has one head, so that as many as possible work


@triton.jit
def _load(place, inside):
    return tl.load(place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _weighted(x, scale, weight_ptr, column, inside, TYPE: tl.constexpr):
    """x float32 [h, d] times scale [h] and weight [d], rounded where the reference rounds."""
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    return (
        ((x * scale[:, None]).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)[None, :]).to(TYPE).to(tl.float32)
    )


@triton.jit
def _turned(
    heads_ptr, weight_ptr, cos, sin, out_ptr, out_head_stride, head, wanted, stored, eps,
    HALF: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    """Heads [h] of one token from heads_ptr, normed and rotated, to out_ptr; those of `stored` [h] alone."""
    kind = heads_ptr.dtype.element_ty
    out_kind = out_ptr.dtype.element_ty
    column = tl.arange(0, BLOCK_HALF)
    there = column < HALF
    inside = wanted[:, None] & there[None, :]
    place = heads_ptr + head[:, None] * HEAD_SIZE + column[None, :]
    first, second = _load(place, inside), _load(place + HALF, inside)
    behind = 2 * HALF + tl.arange(0, BLOCK_REST)
    in_rest = wanted[:, None] & (behind < HEAD_SIZE)[None, :]
    rest = _load(heads_ptr + head[:, None] * HEAD_SIZE + behind[None, :], in_rest)
    if NORMED:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if HEAD_SIZE > 2 * HALF:
            squares += tl.sum(rest * rest, 1)
        scale = 1.0 / tl.sqrt_rn(squares / HEAD_SIZE + eps)
        first = _weighted(first, scale, weight_ptr, column, there, kind)
        second = _weighted(second, scale, weight_ptr + HALF, column, there, kind)
        if HEAD_SIZE > 2 * HALF:
            rest = _weighted(rest, scale, weight_ptr, behind, behind < HEAD_SIZE, kind)
    target = out_ptr + head[:, None] * out_head_stride
    left = (first * cos[None, :] - second * sin[None, :]).to(kind).to(out_kind)
    right = (second * cos[None, :] + first * sin[None, :]).to(kind).to(out_kind)
    tl.store(target + column[None, :], left, mask=inside & stored[:, None])
    tl.store(target + HALF + column[None, :], right, mask=inside & stored[:, None])
    if HEAD_SIZE > 2 * HALF:
        tl.store(target + behind[None, :], rest.to(kind).to(out_kind), mask=in_rest & stored[:, None])


@triton.jit
def _copied(
    heads_ptr, out_ptr, out_head_stride, head, stored, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Heads [h] of one token as they are, those of `stored` [h]."""
    column = tl.arange(0, BLOCK_D)
    inside = stored[:, None] & (column < HEAD_SIZE)[None, :]
    value = tl.load(heads_ptr + head[:, None] * HEAD_SIZE + column[None, :], mask=inside)
    tl.store(
        out_ptr + head[:, None] * out_head_stride + column[None, :], value.to(out_ptr.dtype.element_ty), mask=inside
    )


@triton.jit(do_not_specialize=["num_slots"])
def heads_kernel(
    positions_ptr, query_ptr, key_ptr, value_ptr, table_ptr, query_norm_ptr, key_norm_ptr, cache_ptr, slots_ptr,
    query_stride, key_stride, value_stride, page_stride, part_stride, head_stride, num_slots, page_size, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    NORMED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_H heads of one token, of queries, of keys or of values."""
    if EARLY:
        next_may_start()
        wait_for_last()
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    query_blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    kv_blocks: tl.constexpr = (KV_HEADS + BLOCK_H - 1) // BLOCK_H
    slot = tl.load(slots_ptr + token, mask=token < num_slots, other=-1)
    kv_heads = tl.where(slot >= 0, KV_HEADS, 0)  # those that are written
    slot = tl.maximum(slot, 0)
    cell = cache_ptr + (slot // page_size) * page_stride + (slot % page_size) * HEAD_SIZE
    if block < query_blocks + kv_blocks:
        column = tl.arange(0, BLOCK_HALF)
        entry = table_ptr + tl.load(positions_ptr + token) * 2 * HALF + column
        cos = tl.load(entry, mask=column < HALF, other=0.0)
        sin = tl.load(entry + HALF, mask=column < HALF, other=0.0)
        if block < query_blocks:
            head = block * BLOCK_H + tl.arange(0, BLOCK_H)
            row = query_ptr + token * query_stride
            _turned(
                row, query_norm_ptr, cos, sin, row, HEAD_SIZE, head, head < HEADS, head < HEADS, eps,
                HALF, HEAD_SIZE, BLOCK_HALF, BLOCK_REST, NORMED,
            )  # fmt: skip
        else:
            head = (block - query_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
            _turned(
                key_ptr + token * key_stride, key_norm_ptr, cos, sin, cell, head_stride, head, head < KV_HEADS,
                head < kv_heads, eps, HALF, HEAD_SIZE, BLOCK_HALF, BLOCK_REST, NORMED,
            )  # fmt: skip
    else:
        head = (block - query_blocks - kv_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
        source = value_ptr + token * value_stride
        _copied(source, cell + part_stride, head_stride, head, head < kv_heads, HEAD_SIZE, BLOCK_D)


def rotary_and_write(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos_sin: torch.Tensor,
    norms: HeadNorms | None,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """See `KernelTable.rotary_and_write`. The rows of query, key and value, the tokens of a page and all of cos_sin are
    dense."""
    tokens, (kv_heads, page_size, head_size) = len(positions), kv_cache.shape[2:]
    if not tokens:
        return
    heads, half = query.shape[-1] // head_size, cos_sin.shape[-1] // 2
    block_d = triton.next_power_of_2(head_size)
    most = triton.next_power_of_2(kv_heads)
    block_h = 1 if tokens <= _FEW_TOKENS else min(most, max(1, _ELEMENTS // block_d))
    blocks = triton.cdiv(heads, block_h) + 2 * triton.cdiv(kv_heads, block_h)
    early = follows_early(query.device)
    launch(
        heads_kernel, (tokens, blocks),
        positions, query, key, value, cos_sin,
        cos_sin if norms is None else norms.query, cos_sin if norms is None else norms.key, kv_cache, slots,
        query.stride(0), key.stride(0), value.stride(0), *kv_cache.stride()[:3],
        len(slots), page_size, 0.0 if norms is None else norms.eps,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_SIZE=head_size, HALF=half, BLOCK_H=block_h, BLOCK_D=block_d,
        BLOCK_HALF=triton.next_power_of_2(half), BLOCK_REST=triton.next_power_of_2(max(1, head_size - 2 * half)),
        NORMED=norms is not None, EARLY=early, num_warps=1 if block_h == 1 else 4,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
