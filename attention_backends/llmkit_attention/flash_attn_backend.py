"""The attention backend around FlashAttention 4, with the Triton kernels for what these do better."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from llmkit.cache_folder import cache_folder
from llmkit.hookspecs.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    AttentionQuery,
    Rotation,
    Support,
)
from llmkit_attention.cache_writer import CacheWriter, current
from llmkit_attention.flash_attn_paged import GENERATIONS
from llmkit_attention.triton_backend import TritonAttention

DTYPES = (torch.bfloat16, torch.float16)
HEAD_SIZES = (64, 128)
MEASURED = (9,)
"""Generations of GPUs on which it was measured beside the Triton kernels."""

PREFERENCE = (30, "long prompts in 0.8 to 0.9 of the Triton kernels' time, all else by these")
"""Score and grounds there; see docs/performance.md."""


@dataclass(frozen=True)
class _Plan:
    """few: the Triton kernels' plan, for steps that are left to them. writer: for the others."""

    batch: AttentionBatch
    few: Any = None
    writer: CacheWriter | None = None


class FlashAttnAttention(AttentionBackend):
    """bfloat16 and float16. least_tokens: of a step with prompts, for FlashAttention to be called.

    Pages of 64 tokens and more are not offered: where a page fills a block of keys, FlashAttention 4 loads it whole,
    and what stands behind a row's end reaches the answer if it is not finite.
    """

    graph_safe = True
    prefix_sharing = TritonAttention.prefix_sharing  # its plans are made of the same batch

    def __init__(self, least_tokens: int) -> None:
        self._least_tokens = least_tokens
        self._triton = TritonAttention()
        self._attend: Any = None

    def support(self, query: AttentionQuery) -> Support:
        reasons = list(self._triton.support(query).reasons)
        capability = query.compute_capability
        if capability is not None and capability[0] not in GENERATIONS:
            reasons.append(
                f"FlashAttention 4 has a paged cache on compute capabilities 9.x and 10.x; the GPU has "
                f"{capability[0]}.{capability[1]}"
            )
        if query.dtype not in DTYPES:
            reasons.append(f"the model's type {query.dtype} is not bfloat16 or float16")
        if query.kv_dtype != query.dtype:
            reasons.append(f"the KV cache's type {query.kv_dtype} is not the model's type {query.dtype}")
        if query.head_size not in HEAD_SIZES:
            reasons.append(f"head size {query.head_size} is not {', '.join(map(str, HEAD_SIZES))}")
        score, grounds = (
            PREFERENCE if capability is None or capability[0] in MEASURED else (10, "not measured on this GPU")
        )
        return Support(score, tuple(dict.fromkeys(reasons)), grounds)

    def page_sizes(self) -> Sequence[int]:
        return (16, 32)

    def plan(self, batch: AttentionBatch) -> _Plan:
        if batch.max_query_len == 1 or batch.num_tokens < self._least_tokens:
            return _Plan(batch, few=self._triton.plan(batch))
        return _Plan(batch, writer=CacheWriter(batch.slot_mapping[: batch.num_tokens]))

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: _Plan,
    ) -> torch.Tensor:
        if metadata.writer is None:
            return self._triton.forward(layer, query, key, value, kv_cache, metadata.few)
        metadata.writer.write(key, value, kv_cache)
        return self._prompts(layer, query, kv_cache, metadata.batch)

    def slots(self, metadata: _Plan) -> torch.Tensor | None:
        return metadata.batch.slot_mapping[: metadata.batch.num_tokens]

    def attend(
        self, layer: AttentionLayer, query: torch.Tensor, kv_cache: torch.Tensor, metadata: _Plan
    ) -> torch.Tensor:
        if metadata.writer is None:
            return self._triton.attend(layer, query, kv_cache, metadata.few)
        return self._prompts(layer, query, kv_cache, metadata.batch)

    def attend_projected(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
        kv_cache: torch.Tensor,
        metadata: _Plan,
    ) -> torch.Tensor | None:
        if metadata.writer is not None:
            return None
        return self._triton.attend_projected(layer, query, key, value, rotation, kv_cache, metadata.few)

    def _prompts(
        self, layer: AttentionLayer, query: torch.Tensor, kv_cache: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        if self._attend is None:
            self._attend = _library()
        rows, tokens = batch.num_rows, batch.num_tokens
        with current(query.device):
            output = self._attend(
                query[:tokens],
                kv_cache[:, 0].transpose(1, 2),  # pages, tokens, heads
                kv_cache[:, 1].transpose(1, 2),
                cu_seqlens_q=batch.query_start_loc[: rows + 1],
                seqused_k=batch.seq_lens[:rows],
                max_seqlen_q=batch.max_query_len,
                max_seqlen_k=batch.max_seq_len,
                page_table=batch.block_table[:rows],
                softmax_scale=layer.scale,
                causal=True,
                window_size=(None if layer.sliding_window is None else layer.sliding_window - 1, None),
                softcap=layer.soft_cap or 0.0,
            )
        output = output[0] if isinstance(output, tuple) else output
        if tokens == query.shape[0]:
            return output
        return torch.cat((output, output.new_zeros(query.shape[0] - tokens, *output.shape[1:])))


def _library() -> Callable[..., Any]:
    """FlashAttention's function for rows of any lengths; what it compiles is kept for the next start, which it must be
    told before it is imported. Its compiler warns of an argument that is never given, which is of no use to users."""
    warnings.filterwarnings("ignore", "Argument aux_data", UserWarning, r"cutlass\.")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache_folder() / "flash-attention"))
    from flash_attn.cute import flash_attn_varlen_func

    attend: Callable[..., Any] = flash_attn_varlen_func
    return attend
