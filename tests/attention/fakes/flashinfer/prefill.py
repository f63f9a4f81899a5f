from __future__ import annotations

import torch

from flashinfer.paged import Planned, layer_of


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer, kv_layout, *, backend):
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"
        assert backend in ("fa2", "fa3", "auto")

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        causal,
        sm_scale,
        window_left,
        logits_soft_cap,
        q_data_type,
        kv_data_type,
        seq_lens,
    ):
        assert causal
        assert len(paged_kv_indices) == int(paged_kv_indptr[-1])
        self._pages = paged_kv_indices
        layer = layer_of(num_qo_heads, num_kv_heads, head_dim_qk, sm_scale, window_left, logits_soft_cap)
        dtypes = (q_data_type, kv_data_type)
        self._planned = Planned(layer, page_size, dtypes, qo_indptr, paged_kv_indptr, paged_kv_last_page_len, seq_lens)

    def run(self, q, paged_kv_cache, *, out):
        return self._planned.run(q, paged_kv_cache, self._pages, out)
