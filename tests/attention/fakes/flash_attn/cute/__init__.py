from __future__ import annotations

from itertools import pairwise

import torch

from llmkit.hookspecs.attention import AttentionLayer
from llmkit.testing.paged_attention import dense_attention


def flash_attn_varlen_func(
    q,
    k,
    v,
    *,
    cu_seqlens_q,
    seqused_k,
    max_seqlen_q,
    max_seqlen_k,
    page_table,
    softmax_scale,
    causal,
    window_size,
    softcap,
):
    """The output alone, as the library returns it, or with None behind it, as some of its versions did."""
    assert causal
    assert window_size[1] is None
    rows = len(seqused_k)
    for array in (cu_seqlens_q, seqused_k, page_table):
        assert array.dtype == torch.int32
        assert array.stride(-1) == 1
    assert len(cu_seqlens_q) == len(page_table) + 1 == rows + 1
    starts = cu_seqlens_q.tolist()
    assert starts[-1] == len(q)
    assert max(b - a for a, b in pairwise(starts)) <= max_seqlen_q
    assert int(seqused_k.max()) <= max_seqlen_k
    window = None if window_size[0] is None else window_size[0] + 1
    layer = AttentionLayer(0, q.shape[1], k.shape[2], q.shape[2], softmax_scale, window, softcap or None)
    page_size = k.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype)
    for row, length in enumerate(seqused_k.tolist()):
        pages = page_table[row, : -(-length // page_size)].long()
        keys, values = (x[pages].flatten(0, 1)[:length] for x in (k, v))
        part = slice(starts[row], starts[row + 1])
        out[part] = dense_attention(layer, q[part], keys, values).to(q.dtype)
    return out, None
