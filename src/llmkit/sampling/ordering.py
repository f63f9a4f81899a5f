"""A total order on vocabulary entries: larger logit first, the lower index first among equals.

torch.topk and torch.sort promise nothing about ties, so what is kept or listed could depend on k or on the
neighbours in the batch. Unique integer keys leave nothing to be decided by the implementation.
"""

from __future__ import annotations

import numpy as np
import torch

_INDEX_MASK = 0xFFFFFFFF
_CACHED_ENTRIES = 1 << 16


def order_keys(logits: torch.Tensor) -> torch.Tensor:
    """logits float32[n, v] → int64[n, v], unique within a row, larger for entries that come first."""
    # Adding 0 turns -0.0 into 0.0, so that both are equal as keys, too.
    bits = (logits + 0.0).view(torch.int32)
    # Two's complement order of the bits is the order of the floats once negative ones are flipped.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    indices = torch.arange(_INDEX_MASK, _INDEX_MASK - logits.shape[-1], -1, device=logits.device)
    return ordered.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(indices)


def indices_of(keys: torch.Tensor) -> torch.Tensor:
    """Vocabulary indices of keys, int64, same shape."""
    return _INDEX_MASK - (keys & _INDEX_MASK)


def top_indices(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Indices int64[n, k] of the k first entries of each row, in order. 1 <= k <= v."""
    if k == logits.shape[-1]:
        return indices_of(order_keys(logits).sort(dim=-1, descending=True).values)
    if logits.device.type == "cpu":
        return _top_indices_cpu(logits, k)
    return _top_by_keys(logits, k)


def _top_by_keys(logits: torch.Tensor, k: int) -> torch.Tensor:
    return indices_of(order_keys(logits).topk(k, dim=-1).values)


def _top_indices_cpu(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Without keys for a whole row, which take several times as long as the choice itself, unless there is something to
    decide: where just k entries are as large as the k-th, topk can only take these."""
    values, indices = logits.topk(k, dim=-1)
    indices = indices.sort(dim=-1).values
    order = logits.gather(-1, indices).sort(dim=-1, descending=True, stable=True).indices
    indices = indices.gather(-1, order)
    has_nan = values[:, 0].isnan()  # which is the greatest for topk
    unsure = ((_counts(logits, values[:, -1:], np.greater_equal) != k) | has_nan).nonzero().squeeze(-1)
    if len(unsure):
        indices[unsure] = _top_by_keys(logits[unsure], k)
    return indices


def ranks_of(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Rank of token_ids int64[n] in their rows of logits [n, v], 1 for the first → int64[n]."""
    own = logits.gather(-1, token_ids.unsqueeze(-1))
    if logits.device.type == "cpu":
        ranks = _counts(logits, own, np.greater) + 1
        tied = (_counts(logits, own, np.greater_equal) != ranks).nonzero().squeeze(-1)
        if len(tied):
            ranks[tied] = _ranks_among_equals(logits[tied], own[tied], token_ids[tied])
        return ranks
    return _ranks_among_equals(logits, own, token_ids)


def _ranks_among_equals(logits: torch.Tensor, own: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    indices = torch.arange(logits.shape[-1], device=logits.device)
    before = (logits > own) | ((logits == own) & (indices < token_ids.unsqueeze(-1)))
    return before.sum(dim=-1) + 1


def _counts(logits: torch.Tensor, bounds: torch.Tensor, compare: np.ufunc) -> torch.Tensor:
    """How many entries of each row of logits float32[n, v] on the CPU compare with bounds [n, 1] → int64[n].

    As many rows at a time as stay in the processor's cache with what is compared, ten times faster than all at once."""
    rows, limits = logits.numpy(), bounds.numpy()
    at_a_time = max(1, _CACHED_ENTRIES // rows.shape[1])
    counts = np.empty(len(rows), np.int64)
    for first in range(0, len(rows), at_a_time):
        part = slice(first, first + at_a_time)
        found = compare(rows[part], limits[part])
        # Without an axis it is vectorised.
        counts[part] = np.count_nonzero(found) if at_a_time == 1 else found.sum(axis=1)
    return torch.from_numpy(counts)


def best_indices(logits: torch.Tensor) -> torch.Tensor:
    """Index of the first entry of each row, int64[n]; of a NaN, if the row has one."""
    if logits.device.type == "cpu":
        # numpy's argmax is vectorised, several times faster than torch's on the CPU; same rules for ties and NaN.
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)
