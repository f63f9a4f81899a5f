"""How far logits are from others, and answers from others; what the commands beside this file print."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Difference:
    """Of logits of several texts from others, over all positions.

    divergence: mean KL divergence of the next token's distribution, nats; spread: standard error of that mean, from the
    texts' own means. largest, mean: absolute differences of logits. same_best: share of positions with the same best
    token. each: the mean divergence of every text.
    """

    divergence: float
    spread: float
    largest: float
    mean: float
    same_best: float
    each: tuple[float, ...]

    def row(self) -> str:
        """Cells of a table in Markdown: divergence, largest and mean difference, same best token."""
        return f"{self.divergence:.2e} ± {self.spread:.0e} | {self.largest:.3g}, {self.mean:.2g} | {self.same_best:.2%}"

    def fewer(self, other: Difference) -> int:
        """Texts in which this divergence is the less one."""
        return sum(mine < theirs for mine, theirs in zip(self.each, other.each, strict=True))


def difference(expected: Sequence[torch.Tensor], actual: Iterable[torch.Tensor]) -> Difference:
    """expected, actual: of every text float32 [t, vocabulary]; compared where the expected ones lie."""
    divergences, differences, same, largest = [], [], [], 0.0
    for right, found in zip(expected, actual, strict=True):
        there = found.to(right.device)
        likely = right.double().log_softmax(-1)
        divergences.append((likely.exp() * (likely - there.double().log_softmax(-1))).sum(-1).cpu())
        apart = (there - right).abs()
        largest = max(largest, apart.max().item())
        differences.append(apart.mean(-1).cpu())
        same.append((there.argmax(-1) == right.argmax(-1)).cpu())
    each = [part.mean().item() for part in divergences]
    whole = torch.cat(divergences).mean().item()
    spread = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else math.nan
    return Difference(
        whole,
        spread,
        largest,
        torch.cat(differences).mean().item(),
        torch.cat(same).double().mean().item(),
        tuple(each),
    )


def margin_noise(expected: Sequence[torch.Tensor], actual: Iterable[torch.Tensor]) -> torch.Tensor:
    """float32 [positions of all texts]: by how much the lead of the best of `expected` over its second changes in
    `actual`. Where two computations of the one kind choose different tokens, these lie about so close together."""
    changes = []
    for right, found in zip(expected, actual, strict=True):
        best = right.topk(2, -1).indices
        before, after = (logits.gather(-1, best).diff(dim=-1).squeeze(-1) for logits in (right, found.to(right.device)))
        changes.append((before - after).abs().cpu())
    return torch.cat(changes)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place where the answers differ; the length of the shorter one where it is all that they share."""
    for place, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))
