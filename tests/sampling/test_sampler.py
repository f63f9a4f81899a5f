from __future__ import annotations

import math

import pytest
import torch

from llmkit.sampling.device_draw import NOT_FINITE
from llmkit.sampling.sampler import FAILURES, NOTHING_ALLOWED

VOCAB = 50


def logits(*rows: int) -> torch.Tensor:
    return torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(sum(rows))) * 2


def test_greedy_takes_the_first_of_the_best(bench):
    b = bench(4)
    b.add(0, temperature=0)
    assert b.sample(torch.tensor([[0.0, 5.0, 5.0, 1.0]]), 0).token_ids.tolist() == [1]


def test_rows_are_addressed_by_slot(bench):
    b = bench(VOCAB)
    x = logits(1, 2, 3)
    for slot in (5, 2, 9):
        b.add(slot, temperature=0)
    b.add(2, temperature=0, allowed_token_ids=[7])
    best = x.argmax(-1).tolist()
    assert b.sample(x, 5, 2, 9).token_ids.tolist() == [best[0], 7, best[2]]


# B18: a seeded answer does not depend on the company.


def test_seeded_tokens_are_the_same_alone_in_company_and_in_any_row(bench):
    x = logits(4)
    mixture = [
        {"temperature": 0.8, "seed": 1},
        {"temperature": 0},
        {"temperature": 1.5, "top_k": 7, "seed": 2},
        {"temperature": 0.9, "top_p": 0.8, "seed": 3},
        {"temperature": 0.9, "min_p": 0.05, "seed": 4},
        {"temperature": 0.7, "frequency_penalty": 1.0, "seed": 5},
        {"temperature": 1.0, "top_p": 0.7, "top_k": 9, "logprobs": 3, "seed": 6},
    ]
    alone = []
    for params in mixture:
        b = bench(VOCAB)
        b.add(3, **params)
        alone.append([b.advance(x, 3)[0] for _ in range(12)])
    together = bench(VOCAB)
    order = [6, 2, 0, 5, 1, 4, 3]
    for slot, i in enumerate(order):
        together.add(slot, **mixture[i])
    steps = [together.advance(x, *range(7)) for _ in range(12)]
    for slot, i in enumerate(order):
        assert [step[slot] for step in steps] == alone[i]


def test_seeded_tokens_survive_preemption(bench):
    x = logits(5)
    params = {"temperature": 1.2, "seed": 42, "frequency_penalty": 1.0, "prompt": [1, 2, 3]}
    b = bench(VOCAB)
    b.add(0, **params)
    expected = [b.advance(x, 0)[0] for _ in range(10)]
    b.add(1, **params)
    first = [b.advance(x, 1)[0] for _ in range(4)]
    b.sampler.remove(1)
    b.add(8, **params, output=first)
    assert first + [b.advance(x, 8)[0] for _ in range(6)] == expected


def test_other_seeds_and_positions_give_other_tokens(bench):
    flat = torch.zeros(1, VOCAB)
    b = bench(VOCAB)
    b.add(0, temperature=1, seed=1)
    b.add(1, temperature=1, seed=2)
    b.add(2, temperature=1, seed=1 + 2**32)
    runs = list(zip(*(b.advance(flat, 0, 1, 2) for _ in range(20)), strict=True))
    assert len(set(runs)) == 3
    assert all(len(set(run)) > 5 for run in runs)


def test_a_seed_of_64_bits_may_be_signed_or_not(bench):
    flat = torch.zeros(1, VOCAB)
    b = bench(VOCAB)
    b.add(0, temperature=1, seed=-1)
    b.add(1, temperature=1, seed=2**64 - 1)
    assert all(len(set(b.advance(flat, 0, 1))) == 1 for _ in range(10))


# B22: extreme settings.


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-30])
def test_tiny_temperature_is_greedy(bench, temperature):
    x = logits(6)
    x[0, 17] = x.max() + 1
    b = bench(VOCAB)
    b.add(0, temperature=temperature, seed=9)
    assert {b.advance(x, 0)[0] for _ in range(10)} == {17}


def test_top_k_that_is_off_or_covers_the_vocabulary_is_the_same(bench):
    x = logits(7)
    answers = {}
    for k in (-1, 0, VOCAB, 100_000, VOCAB - 1, 1):
        b = bench(VOCAB)
        b.add(0, temperature=1.5, seed=3, top_k=k)
        answers[k] = [b.advance(x, 0)[0] for _ in range(12)]
    assert answers[-1] == answers[0] == answers[VOCAB] == answers[100_000]
    assert answers[1] == [int(x.argmax())] * 12
    assert answers[0] != answers[1]


def test_limits_that_cut_nothing_change_nothing(bench):
    x = logits(8)
    answers = []
    for params in ({}, {"top_p": 1.0, "min_p": 0.0}, {"min_p": 1e-30}, {"top_p": 0.99999999}):
        b = bench(VOCAB)
        b.add(0, temperature=1.0, seed=3, **params)
        answers.append([b.advance(x, 0)[0] for _ in range(20)])
    assert all(answer == answers[0] for answer in answers)


# B20: penalties.


def test_presence_and_frequency_look_at_the_answer_only(bench):
    x = torch.zeros(1, VOCAB)
    x[0, 3] = 1.0
    b = bench(VOCAB)
    b.add(0, temperature=0, frequency_penalty=2, presence_penalty=2, prompt=[3, 3, 3], logprobs=-1)
    plain = b.sample(x, 0)
    assert plain.token_ids.tolist() == [3]
    assert plain.logprobs[0].logprobs[0] == pytest.approx(float(x.log_softmax(-1)[0, 3]))
    assert b.sample(x, 0).token_ids.tolist() == [0]  # now 3 has been generated once


def test_frequency_counts_and_presence_does_not(bench):
    x = torch.zeros(1, VOCAB)
    b = bench(VOCAB)
    b.add(0, temperature=0, frequency_penalty=0.5, presence_penalty=0.25, output=[4, 4, 4, 5], logprobs=-1)
    expected = torch.zeros(VOCAB)
    expected[4], expected[5] = -1.75, -0.75
    entry = b.sample(x, 0).logprobs[0]
    got = torch.empty(VOCAB)
    got[torch.tensor(entry.token_ids)] = torch.tensor(entry.logprobs)
    torch.testing.assert_close(got, expected.log_softmax(-1))


def test_repetition_sees_prompt_and_answer_and_pushes_down_either_sign(bench):
    x = torch.linspace(-2, 2, VOCAB)[None]
    b = bench(VOCAB)
    b.add(0, temperature=0, repetition_penalty=1.5, prompt=[0, 49], output=[48], logprobs=-1)
    expected = x[0].clone()
    expected[0] *= 1.5
    expected[48:] /= 1.5
    entry = b.sample(x, 0).logprobs[0]
    got = torch.empty(VOCAB)
    got[torch.tensor(entry.token_ids)] = torch.tensor(entry.logprobs)
    torch.testing.assert_close(got, expected.log_softmax(-1))


def test_counts_are_rebuilt_after_preemption_and_gone_with_the_slot(bench):
    x = logits(9)
    params = {"temperature": 0, "frequency_penalty": 1.0, "prompt": [1, 2]}
    b = bench(VOCAB)
    for slot in range(6):  # more than the first capacity of the counters
        b.add(slot, **params)
    whole = [b.advance(x, *range(6)) for _ in range(8)]
    assert all(len(set(step)) == 1 for step in whole)
    expected = [step[0] for step in whole]
    b.sampler.remove(2)
    b.add(2, **params, output=expected[:4])
    b.add(40, temperature=0, frequency_penalty=1.0, prompt=[1])
    assert [b.advance(x, 2)[0] for _ in range(4)] == expected[4:]
    assert b.advance(x, 40)[0] == expected[0]


# Bias, restriction, banned words, minimum length.


def test_logit_bias(bench):
    b = bench(VOCAB)
    b.add(0, temperature=0, logit_bias={7: 100.0, 8: 99.0})
    b.add(1, temperature=0, logit_bias={int(logits(10).argmax()): -100.0})
    first, second = b.sample(logits(10), 0, 1).token_ids.tolist()
    assert first == 7
    assert second == int(logits(10).topk(2).indices[0, 1])


def test_allowed_token_ids_in_a_mixed_batch(bench):
    b = bench(VOCAB)
    b.add(0, temperature=0)
    b.add(1, temperature=1.0, seed=1, allowed_token_ids=[11, 12])
    b.add(2, temperature=0, allowed_token_ids=[13])
    x = logits(11)
    for _ in range(10):
        tokens = b.advance(x, 0, 1, 2)
        assert tokens[0] == int(x.argmax())
        assert tokens[1] in (11, 12)
        assert tokens[2] == 13


def test_banned_sequences_of_different_lengths(bench):
    # B24: [24098] and [888, 12895, 483] in small.
    b = bench(VOCAB)
    x = torch.zeros(1, VOCAB)
    x[0, 24] = 4.0
    x[0, 8] = 3.0
    b.add(0, temperature=0, bad_words_ids=[(24,), (8, 12, 48)], prompt=[8, 12])
    assert b.advance(x, 0) == [8]
    x[0, 8], x[0, 12] = 0.0, 3.0
    assert b.advance(x, 0) == [12]
    x[0, 12], x[0, 48], x[0, 5] = 0.0, 3.0, 2.0
    assert b.sample(x, 0).token_ids.tolist() == [5]
    assert b.advance(x, 0) == [5]
    assert b.advance(x, 0) == [48]  # allowed again: the words before it are others now


def test_the_prompt_does_not_begin_a_banned_sequence(bench):
    b = bench(VOCAB)
    x = torch.zeros(1, VOCAB)
    x[0, 48] = 3.0
    b.add(0, temperature=0, bad_words_ids=[(8, 12, 48)], prompt=[8, 12])
    assert b.sample(x, 0).token_ids.tolist() == [48]


def test_min_tokens_holds_back_every_stop_token(bench):
    # B08
    b = bench(VOCAB)
    x = torch.zeros(1, VOCAB)
    x[0, 2], x[0, 30], x[0, 7] = 9.0, 8.0, 1.0
    b.add(0, temperature=0, min_tokens=3, stop_token_ids=[2, 30, 10_000], prompt=[1, 1])
    assert [b.advance(x, 0)[0] for _ in range(4)] == [7, 7, 7, 2]


def test_min_tokens_still_counts_after_preemption(bench):
    b = bench(VOCAB)
    x = torch.zeros(1, VOCAB)
    x[0, 2] = 9.0
    b.add(0, temperature=0, min_tokens=3, stop_token_ids=[2], prompt=[1], output=[5, 5])
    assert [b.advance(x, 0)[0] for _ in range(2)] == [0, 2]


# Log-probabilities.


def test_logprobs_are_taken_before_temperature_and_truncation(bench):
    x = logits(12)
    b = bench(VOCAB)
    b.add(0, temperature=0.3, top_k=3, seed=1, logprobs=5)
    sampled = b.sample(x, 0)
    entry, token = sampled.logprobs[0], int(sampled.token_ids[0])
    plain = x.log_softmax(-1)[0]
    top = plain.topk(5)
    assert entry.token_ids == [token, *top.indices.tolist()]
    assert entry.logprobs == pytest.approx([float(plain[token]), *top.values.tolist()], abs=1e-5)
    assert entry.ranks == [int((plain > plain[token]).sum()) + 1, 1, 2, 3, 4, 5]


def test_number_of_logprobs_per_row(bench):
    # B14: 0, some, all, more than there are; -1 is all.
    x = logits(13)
    b = bench(VOCAB)
    for slot, k in enumerate((None, 0, 4, -1, 60_000, 1)):
        b.add(slot, temperature=0, logprobs=k)
    entries = b.sample(x, *range(6)).logprobs
    assert sorted(entries) == [1, 2, 3, 4, 5]
    assert [len(entries[i].token_ids) for i in (1, 2, 3, 4, 5)] == [1, 5, VOCAB + 1, VOCAB + 1, 2]
    assert sorted(entries[3].token_ids[1:]) == list(range(VOCAB))
    assert entries[3].ranks[1:] == list(range(1, VOCAB + 1))


def test_impossible_tokens_do_not_poison_the_sampled_one(bench):
    # B10
    b = bench(VOCAB)
    b.add(0, temperature=1, seed=1, allowed_token_ids=[30], logprobs=5)
    entry = b.sample(logits(14), 0).logprobs[0]
    assert entry.token_ids[:2] == [30, 30]
    assert entry.logprobs[0] == 0.0
    assert entry.logprobs[2:] == [-math.inf] * 4
    assert entry.token_ids[2:] == [0, 1, 2, 3]


# One bad row fails alone.


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1}, {"temperature": 1, "top_p": 0.5}])
def test_unusable_logits_fail_their_row_only(bench, bad, params):
    x = logits(15, 16, 17)
    b = bench(VOCAB)
    for slot in range(3):
        b.add(slot, seed=slot, logprobs=1, **params)
    expected = b.sample(x, 0, 1, 2).token_ids.tolist()
    x[1, 20] = bad
    sampled = b.sample(x, 0, 1, 2)
    assert sampled.token_ids.tolist() == [expected[0], -1, expected[2]]
    assert sampled.failed == {1: FAILURES[NOT_FINITE]}
    assert sorted(sampled.logprobs) == [0, 2]


def test_a_model_may_mask_entries_itself(bench):
    x = logits(18)
    x[0, 40:] = -math.inf
    b = bench(VOCAB)
    b.add(0, temperature=1, seed=1)
    assert not b.sample(x, 0).failed


def test_nothing_left_to_choose(bench):
    b = bench(VOCAB)
    b.add(0, temperature=0, allowed_token_ids=[30], min_tokens=1, stop_token_ids=[30])
    b.add(1, temperature=0)
    sampled = b.sample(logits(19), 0, 1)
    assert sampled.failed == {0: FAILURES[NOTHING_ALLOWED]}
    assert sampled.token_ids.tolist() == [-1, int(logits(19).argmax())]


def test_ids_outside_the_vocabulary_name_nothing(bench):
    b = bench(VOCAB)
    b.add(0, temperature=0, logit_bias={10_000: 5.0, 3: 50.0}, bad_words_ids=[(10_000,)])
    b.add(1, temperature=0, allowed_token_ids=[10_000])
    sampled = b.sample(logits(20), 0, 1)
    assert sampled.token_ids.tolist() == [3, -1]
    assert sampled.failed == {1: FAILURES[NOTHING_ALLOWED]}


def test_a_reused_slot_starts_clean(bench):
    x = logits(21)
    b = bench(VOCAB)
    b.add(0, temperature=0, logit_bias={3: 100.0}, allowed_token_ids=[3], bad_words_ids=[(4,)], frequency_penalty=2)
    assert b.sample(x, 0).token_ids.tolist() == [3]
    b.sampler.remove(0)
    b.add(0, temperature=0)
    assert b.sample(x, 0).token_ids.tolist() == [int(x.argmax())]
    b.add(0, temperature=0, logit_bias={5: 100.0})
    assert b.sample(x, 0).token_ids.tolist() == [5]
