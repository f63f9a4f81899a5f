"""Draw tokens from scaled and truncated logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from llmkit.sampling import parameters
from llmkit.sampling.chunks import chunk_rows
from llmkit.sampling.gumbel import gumbel_noise, gumbel_noise_at
from llmkit.sampling.ordering import best_indices
from llmkit.sampling.parameters import SlotArray, SlotParameters
from llmkit.sampling.truncation import Truncation, candidates, mask_min_p


@dataclass(frozen=True)
class Draws:
    """n rows to draw for, all with a temperature above 0. Arrays on the host; needs, slots, positions [n]."""

    slots: SlotArray
    positions: SlotArray
    needs: SlotArray


def draw(logits: torch.Tensor, draws: Draws, params: SlotParameters) -> torch.Tensor:
    """logits float32[n, v] → sampled token ids int64[n]. Overwrites `logits`."""
    size = chunk_rows(logits)
    truncated = (draws.needs & parameters.TRUNCATED) != 0
    if truncated.any() and not truncated.all():
        return _draw_apart(logits, draws, params, truncated)
    draw_some = _draw_truncated if truncated.any() else _draw_plain
    parts = []
    for start in range(0, len(logits), size):
        part = slice(start, start + size)
        chunk = Draws(draws.slots[part], draws.positions[part], draws.needs[part])
        parts.append(draw_some(logits[part], chunk, params))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _draw_apart(logits: torch.Tensor, draws: Draws, params: SlotParameters, truncated: SlotArray) -> torch.Tensor:
    """Rows with and without truncation are drawn by different means."""
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for rows in (np.flatnonzero(truncated), np.flatnonzero(~truncated)):
        row_ids = torch.from_numpy(rows).to(logits.device)
        part = Draws(draws.slots[rows], draws.positions[rows], draws.needs[rows])
        token_ids[row_ids] = draw(logits[row_ids], part, params)
    return token_ids


def _draw_plain(logits: torch.Tensor, draws: Draws, params: SlotParameters) -> torch.Tensor:
    scores = _scale(logits, draws, params)
    if (draws.needs & parameters.MIN_P).any():
        mask_min_p(scores, _gathered(params.log_min_p, draws, logits))
    seeds, positions = _keys(draws, params, logits.device)
    return best_indices(scores.add_(gumbel_noise(seeds, positions, logits.shape[-1])))


def _draw_truncated(logits: torch.Tensor, draws: Draws, params: SlotParameters) -> torch.Tensor:
    scores = _scale(logits, draws, params)
    limits = Truncation(
        top_k=_gathered(params.top_k, draws, logits),
        top_p=_gathered(params.top_p, draws, logits),
        log_min_p=_gathered(params.log_min_p, draws, logits),
        largest_top_k=int(params.top_k[draws.slots].max()),
    )
    indices, kept = candidates(scores, limits)
    seeds, positions = _keys(draws, params, logits.device)
    best = best_indices(kept + gumbel_noise_at(seeds, positions, indices))
    return indices.gather(-1, best.unsqueeze(-1)).squeeze(-1)


def _scale(logits: torch.Tensor, draws: Draws, params: SlotParameters) -> torch.Tensor:
    """Divide by the temperature, in place. The best entry is moved to 0 first: then no temperature overflows."""
    temperatures = _gathered(params.temperatures, draws, logits).unsqueeze(-1)
    return logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(temperatures)


def _gathered(values: SlotArray, draws: Draws, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values[draws.slots]).to(like.device, non_blocking=True)


def _keys(draws: Draws, params: SlotParameters, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    seeds = torch.from_numpy(params.seeds[draws.slots]).to(device, non_blocking=True)
    positions = torch.from_numpy(draws.positions.astype(np.int64)).to(device, non_blocking=True)
    return seeds, positions
