"""min_p, top_k and top_p: which vocabulary entries may be drawn.

In this order, each over what the one before left: min_p keeps entries with at least min_p times the best one's
probability, top_k the k first, top_p the shortest run of first entries whose share of the probability reaches top_p
(Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020). All three keep a prefix of the order of
`llmkit.sampling.ordering`, and always the best entry.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmkit.sampling.ordering import top_indices

_FIRST_WIDTHS = (1024, 8192)


@dataclass(frozen=True)
class Truncation:
    """Limits of n rows, on the logits' device.

    top_k int64[n] (the vocabulary's size: off). top_p float64[n]. log_min_p float32[n], logarithm of min_p (-inf: off).
    largest_top_k: the largest top_k, known on the host so that nothing has to wait for the device.
    """

    top_k: torch.Tensor
    top_p: torch.Tensor
    log_min_p: torch.Tensor
    largest_top_k: int


def candidates(scores: torch.Tensor, limits: Truncation) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled logits float32[n, v] → (indices int64[n, k], scores float32[n, k], -inf where cut), best first."""
    vocab_size = scores.shape[-1]
    if limits.largest_top_k < vocab_size:
        return _candidates(scores, limits, limits.largest_top_k)[:2]
    if scores.device.type == "cpu":
        # A full sort costs milliseconds, and nearly always a few hundred entries hold the share asked for. Looking
        # at the outcome is free on the CPU only; elsewhere it would wait for the device.
        for width in _FIRST_WIDTHS:
            if width < vocab_size:
                indices, kept, complete = _candidates(scores, limits, width)
                if bool(complete.all()):
                    return indices, kept
    return _candidates(scores, limits, vocab_size)[:2]


def _candidates(
    scores: torch.Tensor, limits: Truncation, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The candidates among the `width` first entries, and whether that is all of them, bool[n].

    Sums are in float64 so that neither the width nor the neighbours can move a cut by rounding.
    """
    indices = top_indices(scores, width)
    kept = scores.gather(-1, indices)
    below_best = kept - kept[:, :1]
    weights = below_best.to(torch.float64).exp()
    top_k, top_p = limits.top_k.unsqueeze(-1), limits.top_p.unsqueeze(-1)
    log_min_p = limits.log_min_p.unsqueeze(-1)
    keep = (torch.arange(width, device=scores.device) < top_k) & (below_best >= log_min_p)
    running = (weights * keep).cumsum(dim=-1)
    if width < scores.shape[-1] <= limits.largest_top_k:
        total = torch.where(top_k <= width, running[:, -1:], _whole_mass(scores, kept[:, :1], log_min_p))
    else:
        total = running[:, -1:]
    share = top_p * total
    # An entry is kept while the entries before it fall short of the share. top_p = 1 is off: the running sum may
    # stop growing before the last small entries.
    keep &= (running - weights * keep < share) | (top_p >= 1.0)
    reached = (running[:, -1:] >= share) & (top_p < 1.0)
    complete = (top_k <= width) | reached | (below_best[:, -1:] < log_min_p)
    return indices, kept.masked_fill(~keep, -torch.inf), complete


def _whole_mass(scores: torch.Tensor, best: torch.Tensor, log_min_p: torch.Tensor) -> torch.Tensor:
    """Sum over the vocabulary of exp(score - best) of the entries that min_p keeps, float64[n, 1]."""
    below_best = scores - best
    below_best.masked_fill_(below_best < log_min_p, -torch.inf)
    return below_best.to(torch.float64).exp_().sum(dim=-1, keepdim=True)


def mask_min_p(scores: torch.Tensor, log_min_p: torch.Tensor) -> torch.Tensor:
    """Set scaled logits [n, v] whose distance to the best one is below log_min_p float32[n] to -inf, in place."""
    best = scores.amax(dim=-1, keepdim=True)
    return scores.masked_fill_(scores - best < log_min_p.unsqueeze(-1), -torch.inf)
