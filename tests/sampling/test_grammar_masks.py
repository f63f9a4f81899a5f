"""Masks of grammars, beside everything else that changes logits."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np
import pytest
import torch

from llmkit.sampling.masks import TokenMasks, apply_masks

VOCABULARY = 50  # no multiple of 32


def masks(allowed: Mapping[int, Collection[int]], vocab_size: int = VOCABULARY) -> TokenMasks:
    """Row → tokens."""
    words = np.zeros((len(allowed), -(-vocab_size // 32)), dtype=np.uint32)
    for row, tokens in enumerate(allowed.values()):
        for token in tokens:
            words[row, token // 32] |= np.uint32(1) << np.uint32(token % 32)
    return TokenMasks(np.array(list(allowed), dtype=np.int32), words.view(np.int32))


def falling(vocab_size: int = VOCABULARY) -> torch.Tensor:
    return -torch.arange(vocab_size, dtype=torch.float32).unsqueeze(0) / 10


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 211])
def test_a_mask_against_brute_force(vocab_size):
    generator = np.random.default_rng(vocab_size)
    allowed = {row: np.flatnonzero(generator.random(vocab_size) < 0.3).tolist() for row in (0, 2, 3)}
    logits = torch.randn(5, vocab_size)
    expected = logits.clone()
    for row, tokens in allowed.items():
        forbidden = [token for token in range(vocab_size) if token not in tokens]
        expected[row, forbidden] = -torch.inf
    apply_masks(logits, masks(allowed, vocab_size))
    assert torch.equal(logits, expected)


def test_rows_with_and_without_a_grammar(bench):
    run = bench(VOCABULARY)
    run.add(0, temperature=0)
    run.add(1, temperature=0, constrained=True)
    run.add(2, temperature=0, constrained=True)
    sampled = run.sample(falling(), 0, 1, 2, masks=masks({1: [31, 32], 2: [49]}))
    assert sampled.token_ids.tolist() == [0, 31, 49]


def test_a_seed_draws_among_what_is_left(bench):
    run = bench(VOCABULARY)
    for slot in range(20):
        run.add(slot, temperature=1.5, seed=slot, top_k=3, constrained=True)
    tokens = run.sample(falling(), *range(20), masks=masks({row: [7, 40, 41, 48] for row in range(20)})).token_ids
    assert set(tokens.tolist()) <= {7, 40, 41}
    assert len(set(tokens.tolist())) > 1


@pytest.mark.parametrize(
    ("params", "token"),
    [
        ({"logit_bias": {3: 100.0, 41: 50.0}}, 41),  # what is forbidden stays so whatever is added
        ({"allowed_token_ids": [3, 48]}, 48),
        ({"bad_words_ids": [(7,)]}, 40),
        ({"min_tokens": 5, "stop_token_ids": [7, 40]}, 41),
        ({"presence_penalty": 2.0, "output": [7, 7]}, 40),
        ({"repetition_penalty": 9.0, "prompt": [7]}, 40),
    ],
)
def test_all_other_processors_work_within_the_mask(bench, params, token):
    run = bench(VOCABULARY)
    run.add(0, temperature=0, constrained=True, **params)
    sampled = run.sample(falling() / 10, 0, masks=masks({0: [7, 40, 41, 48]}))
    assert sampled.token_ids.tolist() == [token]
    assert not sampled.failed


def test_nothing_in_common_fails_the_row_alone(bench):
    run = bench(VOCABULARY)
    run.add(0, temperature=0, constrained=True, allowed_token_ids=[3])
    run.add(1, temperature=0, constrained=True)
    sampled = run.sample(falling(), 0, 1, masks=masks({0: [7], 1: [8]}))
    assert sampled.token_ids.tolist() == [-1, 8]
    assert "structured_outputs, allowed_token_ids" in sampled.failed[0]


def test_logprobs_are_those_of_the_masked_distribution(bench):
    run = bench(VOCABULARY)
    run.add(0, temperature=0, logprobs=3, constrained=True)
    entry = run.sample(torch.zeros(1, VOCABULARY), 0, masks=masks({0: [7, 40]})).logprobs[0]
    assert entry.token_ids[:3] == [7, 7, 40]
    assert entry.logprobs[:3] == pytest.approx([math.log(0.5)] * 3)
    assert entry.logprobs[3] == -math.inf  # impossible, as for every other mask


def test_a_model_that_yields_nothing_usable_is_noticed_first(bench):
    run = bench(VOCABULARY)
    run.add(0, temperature=0, constrained=True)
    sampled = run.sample(torch.full((1, VOCABULARY), torch.nan), 0, masks=masks({0: [7]}))
    assert "not finite" in sampled.failed[0]
