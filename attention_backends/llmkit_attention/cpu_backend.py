"""The attention backend around the compiled CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from llmkit.hookspecs.attention import AttentionBackend, AttentionBatch, AttentionLayer, AttentionQuery, Support
from llmkit.jit import runtime
from llmkit_attention import cpu_cache, cpu_kernels
from llmkit_attention.cpu_prefixes import SharedPrefixes, equal, shared_prefixes

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class _Plan:
    """A step's batch; which of its rows share a prefix is found when the first layer tells how many heads there are."""

    batch: AttentionBatch
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    num_tokens: int
    _prefixes: dict[tuple[int, int], SharedPrefixes | None] = field(default_factory=dict)

    def prefixes(self, num_heads: int, num_kv_heads: int) -> SharedPrefixes | None:
        """Rows that share a prefix, for layers with so many heads."""
        key = (num_heads, num_kv_heads)
        if key not in self._prefixes:
            self._prefixes[key] = shared_prefixes(
                self.block_table.numpy(),
                np.diff(self.batch.query_start_loc_np),
                self.batch.seq_lens_np,
                self.batch.page_size,
                block=cpu_kernels.BLOCK,
                num_kv_heads=num_kv_heads,
                most_sequences=cpu_kernels.most_together(num_heads // num_kv_heads),
                threads=torch.get_num_threads(),
            )
        return self._prefixes[key]

    def has_prefixes_of(self, other: _Plan) -> bool:
        """Whether the rows of `other` share prefixes exactly as those of this plan did when it was used."""
        return all(equal(prefixes, other.prefixes(*key)) for key, prefixes in self._prefixes.items())


class CPUAttention(AttentionBackend):
    """Computes in float32 whatever the types of model and cache; the cache may be narrower than the model."""

    def support(self, query: AttentionQuery) -> Support:
        reasons = []
        if query.device_type != "cpu":
            reasons.append(f"runs on the CPU, not on {query.device_type}")
        for what, dtype in (("model", query.dtype), ("KV cache", query.kv_dtype)):
            if dtype not in _DTYPES:
                reasons.append(f"the {what}'s type {dtype} is not float32, bfloat16 or float16")
        if query.head_size % cpu_cache.HEAD_ALIGNMENT:
            reasons.append(f"head size {query.head_size} is not a multiple of {cpu_cache.HEAD_ALIGNMENT}")
        if query.num_heads % query.num_kv_heads:
            reasons.append(f"{query.num_heads} query heads are not a multiple of {query.num_kv_heads} KV heads")
        return Support(score=10, reasons=tuple(reasons))

    def page_sizes(self) -> Sequence[int]:
        return (16, 32, 64, 128, 256, 8, 4, 2)

    def plan(self, batch: AttentionBatch) -> _Plan:
        return _Plan(
            batch,
            batch.query_start_loc[: batch.num_rows + 1].contiguous(),
            batch.seq_lens[: batch.num_rows].contiguous(),
            batch.block_table[: batch.num_rows].contiguous(),
            batch.slot_mapping[: batch.num_tokens].contiguous(),
            batch.num_tokens,
        )

    def replays(self, recorded: _Plan, metadata: _Plan) -> bool:
        return recorded.has_prefixes_of(metadata)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: _Plan,
    ) -> torch.Tensor:
        tokens = metadata.num_tokens
        cpu_cache.write_kv(key[:tokens], value[:tokens], kv_cache, metadata.slot_mapping)
        wide = query.float()
        if not cpu_cache.dense_rows(wide):
            wide = wide.contiguous()
        output = runtime.empty(tuple(wide.shape))
        if tokens < query.shape[0]:
            output[tokens:] = 0.0
        cpu_kernels.paged_attention(
            wide,
            kv_cache,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            layer.scale,
            layer.sliding_window or 0,
            layer.soft_cap or 0.0,
            output,
            None if layer.sliding_window else metadata.prefixes(layer.num_heads, layer.num_kv_heads),
        )
        return output.to(query.dtype)
