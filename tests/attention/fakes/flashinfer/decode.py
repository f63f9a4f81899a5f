from __future__ import annotations

import torch

from flashinfer.paged import Planned, layer_of


class BatchDecodeWithPagedKVCacheWrapper:
    """With buffers of its caller, as for graphs."""

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout,
        *,
        use_cuda_graph,
        use_tensor_cores,
        paged_kv_indptr_buffer,
        paged_kv_indices_buffer,
        paged_kv_last_page_len_buffer,
        backend,
    ):
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"
        assert use_cuda_graph
        assert use_tensor_cores
        assert backend == "fa2"
        self._starts, self._pages = paged_kv_indptr_buffer, paged_kv_indices_buffer
        self._last = paged_kv_last_page_len_buffer
        assert len(self._starts) == len(self._last) + 1

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        assert float_workspace_buffer.device == int_workspace_buffer.device
        assert int_workspace_buffer.dtype == torch.uint8

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        window_left,
        logits_soft_cap,
        sm_scale,
        q_data_type,
        kv_data_type,
        seq_lens,
    ):
        assert len(last_page_len) == len(self._last), "the batch size is fixed"
        assert len(indices) <= len(self._pages)
        assert int(indptr[-1]) <= len(self._pages), "more pages than there is room for"
        self._starts.copy_(indptr)
        self._last.copy_(last_page_len)
        self._pages[: len(indices)].copy_(indices)
        layer = layer_of(num_qo_heads, num_kv_heads, head_dim, sm_scale, window_left, logits_soft_cap)
        starts = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        self._planned = Planned(layer, page_size, (q_data_type, kv_data_type), starts, indptr, last_page_len, seq_lens)

    def run(self, q, paged_kv_cache, *, out):
        assert self._starts.tolist() == self._planned.page_starts
        return self._planned.run(q, paged_kv_cache, self._pages, out)
