"""The attention backend around FlashInfer."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch

from llmkit.hookspecs.attention import AttentionBackend, AttentionBatch, AttentionLayer, AttentionQuery, Support
from llmkit_attention.cache_writer import CacheWriter, current
from llmkit_attention.flashinfer_steps import PlannedLayers, Workspace
from llmkit_attention.page_lists import PageLists
from llmkit_attention.triton_prepare import INTERPRETED
from llmkit_attention.triton_schedule import IntArray

DTYPE = torch.bfloat16
HEAD_SIZES = (64, 128)
GROUNDS = "slower than the Triton kernels on an H200"


class _Plan:
    """A step's. planned: what runs it, by the kind of layer; the first of each kind fills it."""

    def __init__(self, batch: AttentionBatch) -> None:
        self.batch = batch
        self.is_decode = batch.max_query_len == 1
        self.lists = PageLists(batch, most=batch.max_seq_len if self.is_decode else None)
        self.writer = CacheWriter(batch.slot_mapping[: batch.num_tokens])
        self.planned: dict[Hashable, PlannedLayers] = {}
        self.first_layer: int | None = None  # with which every pass over the layers begins


class FlashInferAttention(AttentionBackend):
    """bfloat16 and head sizes 64 and 128: what has been tried of the library's many variants. Decode steps are planned
    for graphs, so that they can be planned anew between replays; other steps for themselves.

    workspace_mib: see the option.
    """

    graph_safe = True

    def __init__(self, workspace_mib: int) -> None:
        self._workspace_mib = workspace_mib
        self._workspaces: dict[torch.device, Workspace] = {}

    def support(self, query: AttentionQuery) -> Support:
        reasons = []
        if query.device_type != "cuda" and not INTERPRETED:
            reasons.append(f"runs on a CUDA GPU, not on {query.device_type}")
        capability = query.compute_capability
        if capability is not None and capability < (8, 0):
            reasons.append(f"needs compute capability 8.0; the GPU has {capability[0]}.{capability[1]}")
        if query.dtype != DTYPE:
            reasons.append(f"the model's type {query.dtype} is not bfloat16")
        if query.kv_dtype != query.dtype:
            reasons.append(f"the KV cache's type {query.kv_dtype} is not the model's type {query.dtype}")
        if query.head_size not in HEAD_SIZES:
            reasons.append(f"head size {query.head_size} is not {', '.join(map(str, HEAD_SIZES))}")
        if query.sliding_window is not None and query.soft_cap is not None:
            reasons.append("a layer with a sliding window and a soft cap has not been tried")
        if query.num_heads % query.num_kv_heads:
            reasons.append(f"{query.num_heads} query heads are not a multiple of {query.num_kv_heads} KV heads")
        return Support(10, tuple(reasons), GROUNDS)

    def page_sizes(self) -> Sequence[int]:
        return (16, 32, 64, 128)

    def workspace_bytes(self) -> int:
        return self._workspace_mib * 2**20

    def plan(self, batch: AttentionBatch) -> _Plan:
        return _Plan(batch)

    def follow(self, metadata: _Plan, seq_lens_np: IntArray) -> None:
        metadata.lists.measure(seq_lens_np[: metadata.batch.num_rows])
        with current(metadata.batch.seq_lens.device):
            for planned in metadata.planned.values():
                planned.plan()

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: _Plan,
    ) -> torch.Tensor:
        metadata.writer.write(key, value, kv_cache)
        return self.attend(layer, query, kv_cache, metadata)

    def slots(self, metadata: _Plan) -> torch.Tensor | None:
        return metadata.writer.slot_mapping

    def attend(
        self, layer: AttentionLayer, query: torch.Tensor, kv_cache: torch.Tensor, metadata: _Plan
    ) -> torch.Tensor:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        tokens = metadata.batch.num_tokens
        output[tokens:] = 0
        if not tokens:
            return output
        query = query if query.stride(-1) == 1 else query.contiguous()
        with current(query.device):
            kind = (replace(layer, index=0), query.dtype)
            planned = metadata.planned.get(kind)
            if planned is None:
                planned = metadata.planned[kind] = self._planned(layer, query, metadata)
            if metadata.first_layer is None:
                metadata.first_layer = layer.index
            if layer.index == metadata.first_layer:
                metadata.lists.gather()
            planned.run(query[:tokens], kv_cache, output[:tokens])
        return output

    def _planned(self, layer: AttentionLayer, query: torch.Tensor, plan: _Plan) -> PlannedLayers:
        workspace = self._workspaces.get(query.device)
        if workspace is None:
            workspace = self._workspaces[query.device] = Workspace(self._workspace_mib, query.device)
        batch, lists = plan.batch, plan.lists
        if plan.is_decode:
            planned, give_back = workspace.decodes(layer, query.dtype, lists, batch.page_size)
        else:
            starts = torch.from_numpy(batch.query_start_loc_np[: batch.num_rows + 1])
            planned, give_back = workspace.prompts(layer, query.dtype, lists, batch.page_size, starts)
            lists.device_starts.copy_(lists.starts, non_blocking=True)
        weakref.finalize(plan, give_back).atexit = False
        planned.plan()
        return planned
