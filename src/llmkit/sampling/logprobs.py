"""Log-probabilities of sampled tokens and of the most likely ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmkit.requests.logprobs import PositionLogprobs
from llmkit.sampling.ordering import ranks_of, top_indices
from llmkit.sampling.parameters import WHOLE_VOCABULARY


def position_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: Sequence[int]
) -> list[PositionLogprobs]:
    """One entry per row: the row's token, then its `num_logprobs` best, -1 for all.

    logits float32[n, v], -inf where a token is impossible; token_ids int64[n]. A number above v means all.
    """
    vocab_size = logits.shape[-1]
    widths = [vocab_size if k == WHOLE_VOCABULARY else min(k, vocab_size) for k in num_logprobs]
    normalizers = logits.logsumexp(dim=-1, keepdim=True)
    own = (logits.gather(-1, token_ids.unsqueeze(-1)) - normalizers).squeeze(-1).tolist()
    ranks = ranks_of(logits, token_ids).tolist()
    entries: list[PositionLogprobs] = []
    tops = _tops(logits, normalizers, widths)
    for row, token_id in enumerate(token_ids.tolist()):
        ids, values = tops[row]
        entries.append(
            PositionLogprobs(
                token_ids=[token_id, *ids],
                logprobs=[own[row], *values],
                ranks=[ranks[row], *range(1, len(ids) + 1)],
            )
        )
    return entries


def _tops(logits: torch.Tensor, normalizers: torch.Tensor, widths: list[int]) -> list[tuple[list[int], list[float]]]:
    """Ids and log-probabilities of each row's `widths[row]` best tokens.

    Rows that want the whole vocabulary are done apart: the others need not pay for a sort.
    """
    tops: list[tuple[list[int], list[float]]] = [([], []) for _ in widths]
    vocab_size = logits.shape[-1]
    whole = [row for row, width in enumerate(widths) if width == vocab_size]
    some = [row for row, width in enumerate(widths) if 0 < width < vocab_size]
    for rows in (some, whole):
        if not rows:
            continue
        subset = logits if len(rows) == len(widths) else logits[rows]
        indices = top_indices(subset, max(widths[row] for row in rows))
        values = subset.gather(-1, indices) - (normalizers if subset is logits else normalizers[rows])
        for row, ids, numbers in zip(rows, indices.tolist(), values.tolist(), strict=True):
            tops[row] = (ids[: widths[row]], numbers[: widths[row]])
    return tops
