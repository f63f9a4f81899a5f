"""Log-probabilities of sampled tokens and of the most likely ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    return device_logprobs(logits, token_ids, num_logprobs).entries(token_ids.tolist())


@dataclass(frozen=True)
class DeviceLogprobs:
    """Of n rows: log-probability float32[n] and rank int64[n] of their tokens; of each row in `rows` of a part its
    `widths[row]` best, of which the part has indices int64[r, k] and values float32[r, k]."""

    own: torch.Tensor
    ranks: torch.Tensor
    widths: list[int]
    parts: tuple[tuple[list[int], torch.Tensor, torch.Tensor], ...]

    def on_host(self, copied: Callable[[torch.Tensor], torch.Tensor]) -> DeviceLogprobs:
        """With every tensor replaced by `copied(tensor)`."""
        parts = tuple((rows, copied(indices), copied(values)) for rows, indices, values in self.parts)
        return DeviceLogprobs(copied(self.own), copied(self.ranks), self.widths, parts)

    def entries(self, token_ids: Sequence[int]) -> list[PositionLogprobs]:
        """One a row, with the row's token. Waits for the device, if the tensors are there."""
        tops: list[tuple[list[int], list[float]]] = [([], []) for _ in self.widths]
        for rows, indices, values in self.parts:
            for row, ids, numbers in zip(rows, indices.tolist(), values.tolist(), strict=True):
                tops[row] = (ids[: self.widths[row]], numbers[: self.widths[row]])
        return [
            PositionLogprobs(token_ids=[token, *ids], logprobs=[own, *values], ranks=[rank, *range(1, len(ids) + 1)])
            for token, own, rank, (ids, values) in zip(
                token_ids, self.own.tolist(), self.ranks.tolist(), tops, strict=True
            )
        ]


def device_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: Sequence[int]) -> DeviceLogprobs:
    """What the entries of `position_logprobs` are made of, on the logits' device; waits for nothing."""
    vocab_size = logits.shape[-1]
    widths = [vocab_size if k == WHOLE_VOCABULARY else min(k, vocab_size) for k in num_logprobs]
    normalizers = logits.logsumexp(dim=-1, keepdim=True)
    own = (logits.gather(-1, token_ids.unsqueeze(-1)) - normalizers).squeeze(-1)
    parts = []
    # Rows that want the whole vocabulary are done apart: the others need not pay for a sort.
    whole = [row for row, width in enumerate(widths) if width == vocab_size]
    some = [row for row, width in enumerate(widths) if 0 < width < vocab_size]
    for rows in (some, whole):
        if not rows:
            continue
        subset = logits if len(rows) == len(widths) else logits[rows]
        indices = top_indices(subset, max(widths[row] for row in rows))
        values = subset.gather(-1, indices) - (normalizers if subset is logits else normalizers[rows])
        parts.append((rows, indices, values))
    return DeviceLogprobs(own, ranks_of(logits, token_ids), widths, tuple(parts))
