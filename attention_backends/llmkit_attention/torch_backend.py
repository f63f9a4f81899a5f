"""Paged attention in plain torch: gather each row's keys and values, a masked softmax in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llmkit.hookspecs.attention import AttentionBackend, AttentionBatch, AttentionLayer, AttentionQuery, Support
from llmkit_attention.cache_types import held_as

_QUERY_CHUNK = 256  # queries whose scores are held at once


@dataclass(frozen=True)
class _Row:
    """One sequence of the step: tokens start..stop of the batch are its last ones, it has `length` in the cache."""

    start: int
    stop: int
    length: int


@dataclass(frozen=True)
class _Plan:
    """tokens: which tokens of the batch are written, None: all; pages, offsets: where each goes."""

    rows: tuple[_Row, ...]
    block_table: torch.Tensor
    page_size: int
    tokens: torch.Tensor | None
    pages: torch.Tensor
    offsets: torch.Tensor


class TorchAttention(AttentionBackend):
    """Any device, type, head size, page size, window and cap; memory for one row's keys and values on top."""

    def support(self, query: AttentionQuery) -> Support:
        reasons = []
        for what, dtype in (("the model's type", query.dtype), ("the KV cache's type", query.kv_dtype)):
            if not dtype.is_floating_point:
                reasons.append(f"{what} {dtype} is not a floating-point type")
        if query.num_heads % query.num_kv_heads:
            reasons.append(f"{query.num_heads} query heads are not a multiple of {query.num_kv_heads} KV heads")
        return Support(reasons=tuple(reasons))

    def page_sizes(self) -> Sequence[int]:
        return (2, 4, 8, 16, 32, 64, 128, 256)

    def plan(self, batch: AttentionBatch) -> _Plan:
        starts, lengths = batch.query_start_loc_np.tolist(), batch.seq_lens_np.tolist()
        rows = tuple(_Row(starts[r], starts[r + 1], lengths[r]) for r in range(batch.num_rows))
        slots = batch.slot_mapping[: batch.num_tokens]
        kept = (slots >= 0).nonzero().flatten()
        tokens = None if kept.shape[0] == slots.shape[0] else kept
        if tokens is not None:
            slots = slots[tokens]
        pages = slots.div(batch.page_size, rounding_mode="floor")
        return _Plan(rows, batch.block_table, batch.page_size, tokens, pages, slots % batch.page_size)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: _Plan,
    ) -> torch.Tensor:
        for part, new in ((0, key), (1, value)):
            written = new[: metadata.rows[-1].stop] if metadata.tokens is None else new[metadata.tokens]
            kv_cache[metadata.pages, part, :, metadata.offsets] = held_as(written, kv_cache.dtype)
        output = torch.zeros_like(query, memory_format=torch.contiguous_format)
        for index, row in enumerate(metadata.rows):
            for start in range(row.start, row.stop, _QUERY_CHUNK):
                stop = min(start + _QUERY_CHUNK, row.stop)
                position = row.length - (row.stop - start)
                keys, values, first = _visible(layer, kv_cache, metadata, index, position, position + stop - start)
                output[start:stop] = _attend(layer, query[start:stop], keys, values, position - first)
        return output


def _visible(
    layer: AttentionLayer, kv_cache: torch.Tensor, plan: _Plan, row: int, position: int, end: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Keys and values float32 [kv_heads, s, head_size] that queries at position..end-1 see, and the first's position.

    What lies before the window is not touched: those pages may have been given away.
    """
    window = layer.sliding_window
    first = 0 if window is None else max(0, position - window + 1)
    size = plan.page_size
    page, last_page = first // size, (end - 1) // size
    pages = plan.block_table[row, page : last_page + 1].long()
    gathered = kv_cache[pages].movedim(0, 2).float()  # [2, kv_heads, pages, page_size, head_size]
    gathered = gathered.flatten(2, 3)[:, :, first - page * size : end - page * size]
    return gathered[0], gathered[1], first


def _attend(
    layer: AttentionLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, offset: int
) -> torch.Tensor:
    """query [n, heads, head_size]; its first token is number `offset` of the s keys. Returns [n, heads, head_size]."""
    count, heads, size = query.shape
    grouped = query.float().view(count, layer.num_kv_heads, heads // layer.num_kv_heads, size).permute(1, 2, 0, 3)
    scores = torch.matmul(grouped, keys[:, None].transpose(-1, -2)) * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    here = torch.arange(offset, offset + count, device=query.device)[:, None]
    there = torch.arange(keys.shape[1], device=query.device)
    hidden = there > here
    if layer.sliding_window is not None:
        hidden |= there <= here - layer.sliding_window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.matmul(weights, values[:, None]).permute(2, 0, 1, 3).reshape(count, heads, size).to(query.dtype)
