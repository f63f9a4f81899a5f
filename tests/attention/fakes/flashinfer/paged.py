"""What both wrappers do: rows as `plan` was told, pages as they are when `run` is called."""

from __future__ import annotations

import torch

from llmkit.hookspecs.attention import AttentionLayer
from llmkit.testing.paged_attention import dense_attention


class Planned:
    """Of n rows: query_starts [n+1], page_starts [n+1], last [n], on the host."""

    def __init__(self, layer, page_size, dtypes, query_starts, page_starts, last, seq_lens):
        for array in (query_starts, page_starts, last, seq_lens):
            assert array.dtype == torch.int32
            assert array.device.type == "cpu", "FlashInfer would wait for the device"
        assert len(query_starts) == len(page_starts) == len(last) + 1 == len(seq_lens) + 1
        self.layer, self.page_size, self.dtypes = layer, page_size, dtypes
        self.query_starts, self.page_starts = query_starts.tolist(), page_starts.tolist()
        self.last, self.lengths = last.tolist(), seq_lens.tolist()

    def run(self, query, kv_cache, pages, out):
        assert (query.dtype, kv_cache.dtype) == self.dtypes
        assert out.shape == query.shape
        assert out.dtype == query.dtype
        assert len(query) == self.query_starts[-1]
        assert kv_cache.shape[1:] == (2, self.layer.num_kv_heads, self.page_size, self.layer.head_size)
        for row, last in enumerate(self.last):
            mine = pages[self.page_starts[row] : self.page_starts[row + 1]].long()
            length = (len(mine) - 1) * self.page_size + last
            assert length == self.lengths[row]
            dense = kv_cache[mine].movedim(3, 1).flatten(0, 1)[:length]  # [length, 2, kv_heads, head_size]
            part = slice(self.query_starts[row], self.query_starts[row + 1])
            out[part] = dense_attention(self.layer, query[part], dense[:, 0], dense[:, 1]).to(out.dtype)
        return out


def layer_of(num_qo_heads, num_kv_heads, head_dim, sm_scale, window_left, logits_soft_cap):
    """The layer that arguments of `plan` describe."""
    window = None if window_left < 0 else window_left + 1
    return AttentionLayer(0, num_qo_heads, num_kv_heads, head_dim, sm_scale, window, logits_soft_cap or None)
