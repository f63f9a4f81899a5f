"""The kernel for keys that many rows share, and how its results are added to those of the rows' own keys.

Source: Juravsky et al., "Hydragen: High-Throughput LLM Inference with Shared Prefixes" (2024): the queries of all rows
of a group attend to the shared keys as one matrix; softmax over both parts by their log-sum-exps.

A group's rows, a token each, are its "tokens" here, and PREFIX_ROWS of them with their heads make a tile as in
`triton_blocks`. The keys of every tile are split, into as many splits as the GPU has programs for; how many follows
from the groups, on the device, so that one launch is right for any groups. What goes through these functions as one
tuple, `prefix`, is (group_starts_ptr, shared_lens_ptr, num_groups, wanted, most_splits), where `wanted` is the number
of tiles times splits that fills the GPU. Results are at (split * num_rows + row) * heads + head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmkit.jit.chain import next_may_start, wait_for_last
from llmkit_attention.triton_blocks import tile_rows
from llmkit_attention.triton_softmax import fold_keys

GROUPS = tl.constexpr(64)  # groups that are looked at at once
UNIT = 128
"""Shared prefixes, and splits of them, are a multiple of so many keys; a multiple of every block of keys."""

_UNIT = tl.constexpr(UNIT)
_AT_ONCE = tl.constexpr(4)  # splits whose loads are under way together


@triton.jit
def _tiles_of(prefix, group, PREFIX_ROWS: tl.constexpr):
    """Tiles of each group; 0 where there is none."""
    group_starts_ptr, _, num_groups, _, _ = prefix
    there = group < num_groups
    start = tl.load(group_starts_ptr + group, mask=there, other=0)
    return tl.cdiv(tl.load(group_starts_ptr + group + 1, mask=there, other=0) - start, PREFIX_ROWS)


@triton.jit
def _num_splits(prefix, PREFIX_ROWS: tl.constexpr):
    """In how many splits the keys of every tile go, unless they are too short."""
    _, _, num_groups, wanted, most_splits = prefix
    tiles = 0
    for start in range(0, num_groups, GROUPS):
        tiles += tl.sum(_tiles_of(prefix, start + tl.arange(0, GROUPS), PREFIX_ROWS), 0)
    return tl.maximum(tl.minimum(wanted // tl.maximum(tiles, 1), most_splits), 1)


@triton.jit
def _keys_per_split(shared, splits):
    return tl.cdiv(tl.cdiv(shared, splits), _UNIT) * _UNIT


@triton.jit
def _find_tile(prefix, tile, PREFIX_ROWS: tl.constexpr):
    """(group, number of the tile within it); group num_groups or more if there are fewer tiles."""
    num_groups = prefix[2]
    group_of_tile = 0
    before = 0
    counted = 0
    for start in range(0, num_groups, GROUPS):
        group = start + tl.arange(0, GROUPS)
        tiles = _tiles_of(prefix, group, PREFIX_ROWS)
        ends = counted + tl.cumsum(tiles, 0)
        passed = (ends <= tile) & (group < num_groups)
        group_of_tile += tl.sum(passed.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(passed, ends, 0), 0))
        counted += tl.sum(tiles, 0)
    return group_of_tile, tile - before


@triton.jit(do_not_specialize=["table_stride", "page_shift", "num_rows", "num_groups", "wanted", "most_splits"])
def prefix_kernel(
    query_ptr, cache_ptr, partial_ptr, lse_ptr, starts_ptr, group_starts_ptr, members_ptr, shared_lens_ptr, table_ptr,
    query_stride, query_head_stride, page_stride, part_stride, head_stride,
    factor, cap, table_stride, page_shift, num_rows, num_groups, wanted, most_splits,
    GROUP_SIZE: tl.constexpr, GROUP: tl.constexpr, PREFIX_ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr, COMPUTE: tl.constexpr, CAPPED: tl.constexpr, FOLDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: (programs for heads, tiles times splits). Arguments as for `attention_kernel`; table_ptr: that of all rows,
    of which every group uses its first member's. Writes the normalised result of each split, row and head, and its
    log-sum-exp (base 2)."""
    if EARLY:
        wait_for_last()
        next_may_start()  # behind the wait: the next kernel counts on all before this one
    prefix = (group_starts_ptr, shared_lens_ptr, num_groups, wanted, most_splits)
    head_program = tl.program_id(0)
    splits = _num_splits(prefix, PREFIX_ROWS)
    split = tl.program_id(1) % splits
    group, number = _find_tile(prefix, tl.program_id(1) // splits, PREFIX_ROWS)
    if group >= num_groups:
        return
    start = tl.load(group_starts_ptr + group)
    size = tl.load(group_starts_ptr + group + 1) - start
    leader = tl.load(members_ptr + start)
    shared = tl.load(shared_lens_ptr + leader)
    span = _keys_per_split(shared, splits)
    begin = split * span
    end = tl.minimum(begin + span, shared)
    if begin >= end:
        return
    member, head, exists = tile_rows(head_program, number * PREFIX_ROWS, size, GROUP_SIZE, GROUP, PREFIX_ROWS, BLOCK_M)
    row = tl.load(members_ptr + start + member, mask=exists, other=0)
    token = tl.load(starts_ptr + row).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    cell = query_ptr + (token * query_stride + head * query_head_stride)[:, None] + column[None, :]
    query = tl.load(cell, mask=exists[:, None] & (column < HEAD_SIZE)[None, :], other=0.0).to(COMPUTE)
    kv_head = head_program // tl.cdiv(GROUP_SIZE, GROUP)
    cache = (
        cache_ptr + kv_head * head_stride, table_ptr + leader.to(tl.int64) * table_stride,
        page_stride, part_stride, page_shift,
    )  # fmt: skip
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    peak = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    acc, total, peak = fold_keys(
        acc, total, peak, query, member, cache, begin, end, 0, end, 0, factor, cap,
        HEAD_SIZE, BLOCK_D, BLOCK_N, PAGE, COMPUTE, False, CAPPED, FOLDED, False,
    )  # fmt: skip
    heads = tl.num_programs(0) // tl.cdiv(GROUP_SIZE, GROUP) * GROUP_SIZE
    place = (split * num_rows + row).to(tl.int64) * heads + head
    tl.store(partial_ptr + place[:, None] * BLOCK_D + column[None, :], acc / total[:, None], mask=exists[:, None])
    tl.store(lse_ptr + place, peak + tl.log2(total), mask=exists)


@triton.jit
def prefix_parts(prefix, row, PREFIX_ROWS: tl.constexpr):
    """(tokens that the row shares, in how many splits their results are)."""
    shared = tl.load(prefix[1] + row)
    span = _keys_per_split(shared, _num_splits(prefix, PREFIX_ROWS))
    return shared, tl.cdiv(shared, tl.maximum(span, 1))


@triton.jit
def add_prefix(acc, lse, partial_ptr, lse_ptr, place, step, num_parts, exists, BLOCK_D: tl.constexpr):
    """acc [BLOCK_M, BLOCK_D], lse [BLOCK_M] of keys of one's own, together with the parts at place [BLOCK_M], place +
    step, …"""
    column = tl.arange(0, BLOCK_D)
    for first in range(0, num_parts, _AT_ONCE):
        for i in tl.static_range(_AT_ONCE):
            there = exists & (place * 0 + (first + i) < num_parts)
            places = place + (first + i) * step
            part_lse = tl.load(lse_ptr + places, mask=there, other=-float("inf"))
            part = tl.load(partial_ptr + places[:, None] * BLOCK_D + column[None, :], mask=there[:, None], other=0.0)
            peak = tl.maximum(lse, part_lse)
            weight = tl.exp2(lse - peak)
            part_weight = tl.exp2(part_lse - peak)
            total = weight + part_weight
            acc = acc * (weight / total)[:, None] + part * (part_weight / total)[:, None]
            lse = peak + tl.log2(total)
    return acc, lse
