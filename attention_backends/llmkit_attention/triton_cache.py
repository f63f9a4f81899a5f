"""The kernel that writes new keys and values into the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmkit_attention.triton_launch import PreparedLaunch


@triton.jit(do_not_specialize=["num_tokens", "page_shift"])
def write_kernel(
    key_ptr,
    value_ptr,
    cache_ptr,
    slots_ptr,
    key_stride,
    value_stride,
    key_head_stride,
    value_head_stride,
    page_stride,
    part_stride,
    head_stride,
    num_tokens,
    page_shift,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One program: BLOCK_T tokens of one KV head, key and value; a page has 2**page_shift tokens."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1)
    column = tl.arange(0, BLOCK_D)
    written = (slot >= 0)[:, None] & (column < HEAD_SIZE)[None, :]
    token = token.to(tl.int64)
    key = key_ptr + head * key_head_stride + token[:, None] * key_stride + column[None, :]
    value = value_ptr + head * value_head_stride + token[:, None] * value_stride + column[None, :]
    place = (slot >> page_shift) * page_stride + (slot & ((1 << page_shift) - 1)) * HEAD_SIZE
    cell = cache_ptr + head * head_stride + place[:, None] + column[None, :]
    tl.store(cell, tl.load(key, mask=written).to(cache_ptr.dtype.element_ty), mask=written)
    tl.store(cell + part_stride, tl.load(value, mask=written).to(cache_ptr.dtype.element_ty), mask=written)


def write_launch(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> PreparedLaunch:
    """The launch that writes key, value [t, kv_heads, head_size] to kv_cache [pages, 2, kv_heads, page_size, head_size]
    where slot_mapping int64[t] says; negative slots are left out. The last dimension of all three must be dense."""
    tokens, (_, _, heads, page_size, head_size) = slot_mapping.shape[0], kv_cache.shape
    # A few tokens: as many programs as possible. Many: neighbours go to the same page.
    block = 4 if tokens <= 512 else 16
    return PreparedLaunch(
        write_kernel,
        (triton.cdiv(tokens, block), heads, 1),
        tensors=(slot_mapping,),
        strides=(key.stride(0), value.stride(0), key.stride(1), value.stride(1), *kv_cache.stride()[:3]),
        numbers=(tokens, page_size.bit_length() - 1),
        constants={
            "HEAD_SIZE": head_size,
            "BLOCK_D": triton.next_power_of_2(head_size),
            "BLOCK_T": block,
        },
    )


def write_kv(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Once what `write_launch` prepares."""
    write_launch(key, value, kv_cache, slot_mapping)(key, value, kv_cache)
