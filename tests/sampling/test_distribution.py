"""What is drawn follows softmax: chi-square tests with fixed seeds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

DRAWS = 20_000
ROWS = 64


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def draw_many(bench, logits: torch.Tensor, **params) -> np.ndarray:
    """Counts of DRAWS tokens, over seeds and positions."""
    b = bench(logits.shape[-1])
    for slot in range(ROWS):
        b.add(slot, seed=1000 + slot, **params)
    counts = np.zeros(logits.shape[-1], dtype=np.int64)
    for position in range(DRAWS // ROWS):
        tokens = b.sample(logits, *range(ROWS), positions=[position] * ROWS).token_ids
        counts += np.bincount(tokens, minlength=len(counts))
    return counts


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature(bench, temperature):
    logits = torch.linspace(-1.5, 1.5, 12)[None]
    counts = draw_many(bench, logits, temperature=temperature)
    probabilities = (logits[0] / temperature).double().softmax(-1).numpy()
    assert chi_square(counts, probabilities) < 31.3  # 0.999 quantile, 11 degrees of freedom


@pytest.mark.parametrize("params", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.5}])
def test_truncated(bench, params):
    probabilities = torch.tensor([0.02, 0.3, 0.04, 0.25, 0.2, 0.04, 0.1, 0.05], dtype=torch.float64)
    keep = {"top_k": [1, 3, 4, 6, 7], "top_p": [1, 3, 4], "min_p": [1, 3, 4]}[next(iter(params))]
    counts = draw_many(bench, probabilities.log().float()[None], temperature=1.0, **params)
    cut = sorted(set(range(8)) - set(keep))
    assert counts[cut].sum() == 0
    share = probabilities[keep].numpy()
    assert chi_square(counts[keep], share / share.sum()) < 18.5  # 0.999 quantile, 4 degrees of freedom


def test_rare_tokens_are_drawn_as_often_as_they_should(bench):
    # The tail of the noise decides here: 1 in 1000 for each of ten tokens.
    probabilities = torch.tensor([0.99] + [0.001] * 10, dtype=torch.float64)
    counts = draw_many(bench, probabilities.log().float()[None], temperature=1.0)
    assert chi_square(counts, probabilities.numpy()) < 29.6  # 0.999 quantile, 10 degrees of freedom
