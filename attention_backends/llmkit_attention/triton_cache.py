"""The kernel that writes new keys and values into the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens"])
def _write_kv(
    key_ptr,
    value_ptr,
    cache_ptr,
    slots_ptr,
    num_tokens,
    key_stride,
    value_stride,
    key_head_stride,
    value_head_stride,
    page_stride,
    part_stride,
    head_stride,
    PAGE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One program: BLOCK_T tokens of one KV head, key and value."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1)
    column = tl.arange(0, BLOCK_D)
    written = (slot >= 0)[:, None] & (column < HEAD_SIZE)[None, :]
    token = token.to(tl.int64)
    key = key_ptr + head * key_head_stride + token[:, None] * key_stride + column[None, :]
    value = value_ptr + head * value_head_stride + token[:, None] * value_stride + column[None, :]
    place = (slot // PAGE) * page_stride + (slot % PAGE) * HEAD_SIZE
    cell = cache_ptr + head * head_stride + place[:, None] + column[None, :]
    tl.store(cell, tl.load(key, mask=written).to(cache_ptr.dtype.element_ty), mask=written)
    tl.store(cell + part_stride, tl.load(value, mask=written).to(cache_ptr.dtype.element_ty), mask=written)


def write_kv(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """key, value [t, kv_heads, head_size] → kv_cache [pages, 2, kv_heads, page_size, head_size], where slot_mapping
    int64[t] says; negative slots are left out. The last dimension of all three must be dense."""
    tokens, (_, _, heads, page_size, head_size) = slot_mapping.shape[0], kv_cache.shape
    # A few tokens: as many programs as possible. Many: neighbours go to the same page.
    block = 4 if tokens <= 512 else 16
    _write_kv[(triton.cdiv(tokens, block), heads)](
        key,
        value,
        kv_cache,
        slot_mapping,
        tokens,
        key.stride(0),
        value.stride(0),
        key.stride(1),
        value.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        PAGE=page_size,
        HEAD_SIZE=head_size,
        BLOCK_D=triton.next_power_of_2(head_size),
        BLOCK_T=block,
    )
