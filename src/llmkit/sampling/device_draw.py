"""Draw tokens where all that the draw depends on lies on the logits' device, so that nothing waits for it.

For rows that take the best token or draw with temperature, top-k, top-p and min_p. `llmkit.sampling.sampler` has the
same outcome for rows that either can do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmkit.sampling.chunks import chunk_rows
from llmkit.sampling.gumbel import gumbel_noise, gumbel_noise_at
from llmkit.sampling.ordering import best_indices
from llmkit.sampling.truncation import Truncation, candidates

NOT_FINITE = -1


@dataclass(frozen=True)
class DeviceTruncation:
    """Of n rows: top_k int64[n], the vocabulary's size where it is off; top_p float64[n], 1 where it is off."""

    top_k: torch.Tensor
    top_p: torch.Tensor

    def of_rows(self, vocab_size: int) -> torch.Tensor:
        """Which rows it cuts anything off, bool[n]."""
        return (self.top_k < vocab_size) | (self.top_p < 1)


@dataclass(frozen=True)
class DrawParameters:
    """What the draws of n rows depend on besides logits and positions, which stays the same from token to token. seeds
    int64[n]; temperatures float32[n], 0 for the best token; log_min_p float32[n], -inf where it is off; truncation:
    None: off in all."""

    seeds: torch.Tensor
    temperatures: torch.Tensor
    log_min_p: torch.Tensor
    truncation: DeviceTruncation | None = None

    def of(self, slots: torch.Tensor) -> DrawParameters:
        """Those at `slots` int64[m]."""
        cut = self.truncation
        truncation = None if cut is None else DeviceTruncation(cut.top_k[slots], cut.top_p[slots])
        return DrawParameters(self.seeds[slots], self.temperatures[slots], self.log_min_p[slots], truncation)

    def at(self, positions: torch.Tensor, last_tokens: LastTokens | None = None) -> DeviceDraws:
        """Draws for `positions` int64[n]."""
        return DeviceDraws(self.seeds, positions, self.temperatures, self.log_min_p, self.truncation, last_tokens)


@dataclass(frozen=True)
class LastTokens:
    """Where the tokens of n rows are noted down: int64 `by_slot` at `slots` int64[n]. 0 is noted for NOT_FINITE, as the
    next token of such a row is drawn for nobody."""

    slots: torch.Tensor
    by_slot: torch.Tensor

    def note(self, tokens: torch.Tensor) -> None:
        """tokens int64[n], below 0 for rows that failed."""
        self.by_slot.index_copy_(0, self.slots, tokens.clamp(min=0))


@dataclass(frozen=True)
class DeviceDraws:
    """Of n rows, on the logits' device. positions int64[n] that the tokens will have; last_tokens: where who draws
    notes them down as well, None for nowhere; the others as in `DrawParameters`."""

    seeds: torch.Tensor
    positions: torch.Tensor
    temperatures: torch.Tensor
    log_min_p: torch.Tensor
    truncation: DeviceTruncation | None = None
    last_tokens: LastTokens | None = None

    def part(self, rows: slice) -> DeviceDraws:
        """Those of some of the rows, noted nowhere."""
        cut = self.truncation
        truncation = None if cut is None else DeviceTruncation(cut.top_k[rows], cut.top_p[rows])
        return DeviceDraws(
            self.seeds[rows], self.positions[rows], self.temperatures[rows], self.log_min_p[rows], truncation
        )


def draw_or_best(logits: torch.Tensor, draws: DeviceDraws) -> torch.Tensor:
    """logits float32[n, v] → token ids int64[n], NOT_FINITE for rows whose best logit is not a finite number."""
    size = chunk_rows(logits)
    parts = [slice(start, start + size) for start in range(0, len(logits), size)]
    each = [_draw_or_best(logits[part], draws.part(part)) for part in parts]
    tokens = each[0] if len(each) == 1 else torch.cat(each)
    if draws.last_tokens is not None:
        draws.last_tokens.note(tokens)
    return tokens


def _draw_or_best(logits: torch.Tensor, draws: DeviceDraws) -> torch.Tensor:
    best = best_indices(logits)
    peak = logits.gather(-1, best.unsqueeze(-1))
    draws_one = draws.temperatures > 0
    scores = (logits - peak).div_(torch.where(draws_one, draws.temperatures, 1.0).unsqueeze(-1))
    cut = None if draws.truncation is None else _draw_truncated(scores, draws, draws.truncation)
    scores.masked_fill_(scores < draws.log_min_p.unsqueeze(-1), -torch.inf)
    drawn = best_indices(scores.add_(gumbel_noise(draws.seeds, draws.positions, logits.shape[-1])))
    if cut is not None and draws.truncation is not None:
        drawn = torch.where(draws.truncation.of_rows(logits.shape[-1]), cut, drawn)
    return torch.where(peak.squeeze(-1).isfinite(), torch.where(draws_one, drawn, best), NOT_FINITE)


def _draw_truncated(scores: torch.Tensor, draws: DeviceDraws, truncation: DeviceTruncation) -> torch.Tensor:
    """Scaled logits float32[n, v] → token ids int64[n], from what is left of every row."""
    limits = Truncation(truncation.top_k, truncation.top_p, draws.log_min_p, largest_top_k=scores.shape[-1])
    indices, kept = candidates(scores, limits)
    best = best_indices(kept + gumbel_noise_at(draws.seeds, draws.positions, indices))
    return indices.gather(-1, best.unsqueeze(-1)).squeeze(-1)
