"""The runner against a dense recomputation of the whole sequence."""

from __future__ import annotations

import pytest
import torch

from llmkit.sampling.device_draw import NOT_FINITE
from llmkit.sampling.sampler import FAILURES

PROMPT = [5, 17, 3, 3, 21, 8, 30, 11, 2, 14, 9]
SHAPES = [
    pytest.param({"windows": (None, None)}, id="one group"),
    pytest.param({"windows": (6, None, 6)}, id="full and sliding"),
    pytest.param({"windows": (None,), "block_size": 8, "page_size": 2}, id="block of four pages"),
]


def decode(d, slot: int, count: int) -> None:
    for _ in range(count):
        result = d.step({slot: 1})
        d.check(slot, result.logprobs[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_whole_prefill_then_decode(driver, shape):
    d = driver(**shape)
    d.add(3, PROMPT)
    result = d.step({3: len(PROMPT)})
    d.check(3, result.logprobs[0])
    decode(d, 3, 12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_chunked_prefill(driver, shape, chunk):
    d = driver(**shape)
    d.add(0, PROMPT)
    for start in range(0, len(PROMPT), chunk):
        result = d.step({0: min(chunk, len(PROMPT) - start)})
        done = start + chunk >= len(PROMPT)
        assert (result.token_ids[0] >= 0) == done
    d.check(0, result.logprobs[0])
    decode(d, 0, 3)


@pytest.mark.parametrize("shape", SHAPES)
def test_mixed_batch_with_rows_that_come_and_go(driver, shape):
    d = driver(**shape)
    d.add(4, PROMPT)
    d.add(1, PROMPT[:3])
    result = d.step({4: 5, 1: 3})
    assert result.token_ids[0] == -1
    d.check(1, result.logprobs[1])
    d.add(6, PROMPT[::-1])
    result = d.step({1: 1, 6: 11, 4: 6})
    for row, slot in enumerate((1, 6, 4)):
        d.check(slot, result.logprobs[row])
    d.remove(1)
    d.add(1, [7, 7, 7, 7, 7])
    result = d.step({6: 1, 1: 5})
    for row, slot in enumerate((6, 1)):
        d.check(slot, result.logprobs[row])
    result = d.step({1: 1, 4: 1, 6: 1})
    for row, slot in enumerate((1, 4, 6)):
        d.check(slot, result.logprobs[row])


@pytest.mark.parametrize("shape", SHAPES)
def test_prefix_of_another_sequence_is_reused(driver, shape):
    d = driver(**shape)
    d.add(0, PROMPT)
    d.step({0: len(PROMPT)})
    block = d.layout.block_size
    shared = [blocks[: 8 // block] for blocks in d.sequences[0].blocks]
    d.add(5, [*PROMPT[:8], 33, 34], computed=8, blocks=[list(blocks) for blocks in shared])
    before = len(d.model.steps)
    result = d.step({5: 2, 0: 1})
    assert d.model.steps[before:] == [3]
    d.check(5, result.logprobs[0])
    d.check(0, result.logprobs[1])


@pytest.mark.parametrize("shape", SHAPES)
def test_fork_copies_the_block_it_writes_to(driver, shape):
    d = driver(**shape)
    d.add(0, PROMPT)
    d.step({0: len(PROMPT)})
    column = (len(PROMPT) - 1) // d.layout.block_size
    blocks = [[*b[:column], d.copy_block(b[column])] for b in d.sequences[0].blocks]
    d.add(2, PROMPT, computed=len(PROMPT) - 1, blocks=blocks, temperature=1.5, seed=1)
    result = d.step({0: 1, 2: 1})
    d.check(0, result.logprobs[0])
    d.check(2, result.logprobs[1])
    d.sequences[2].tokens[-1] = 39
    d.runner._batch.token_ids[2, len(PROMPT)] = 39
    for _ in range(5):
        result = d.step({2: 1, 0: 1})
        d.check(2, result.logprobs[0])
        d.check(0, result.logprobs[1])


def test_block_copies_follow_one_another(driver):
    d = driver((None,))
    d.add(0, PROMPT[:4])
    d.step({0: 4})
    first = d.sequences[0].blocks[0][0]
    middle, last = d.new_block(), d.new_block()
    d._copies += [(first, middle), (middle, last)]
    d.add(1, PROMPT[:5], computed=4, blocks=[[last]])
    d.check(1, d.step({1: 1}).logprobs[0])


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 3, "frequency_penalty": 0.5, "logprobs": None}])
def test_preemption_and_resumption_give_the_same_tokens(driver, params):
    d = driver((6, None))
    d.add(0, PROMPT, **params)
    d.step({0: len(PROMPT)})
    for _ in range(9):
        d.step({0: 1})
    expected = d.sequences[0].tokens
    d = driver((6, None))
    d.add(0, PROMPT, **params)
    d.step({0: len(PROMPT)})
    for _ in range(3):
        d.step({0: 1})
    state = d.remove(0)
    d.add(7, PROMPT, state.tokens[len(PROMPT) :], **params)
    d.step({7: 6})
    d.step({7: len(state.tokens) - 6})
    for _ in range(5):
        d.step({7: 1})
    assert d.sequences[7].tokens == expected[: len(d.sequences[7].tokens)]
    assert len(d.sequences[7].tokens) == len(PROMPT) + 10


@pytest.mark.parametrize("chunk", [2, 5, 11])
@pytest.mark.parametrize("wanted", [0, 3, -1])
def test_prompt_logprobs_over_chunks(driver, chunk, wanted):
    d = driver((None, None))
    d.add(0, [1, 2, 3])
    d.add(5, PROMPT, prompt_logprobs=wanted)
    d.runner._prompt_scorer._chunk = 3
    entries, start = [], 0
    while start < len(PROMPT):
        new = min(chunk, len(PROMPT) - start)
        result = d.step({0: 3 if start == 0 else 1, 5: new})
        got = result.prompt_logprobs.get(1, [])
        assert len(got) == min(new, len(PROMPT) - 1 - start)  # entry j is prompt position start + 1 + j
        assert 0 not in result.prompt_logprobs
        entries += got
        start += new
    assert 0 not in d.step({5: 1}).prompt_logprobs
    plain = d.model.dense(PROMPT).log_softmax(-1)
    width = len(plain[0]) if wanted == -1 else wanted
    for position, entry in enumerate(entries, start=1):
        assert len(entry.token_ids) == 1 + width
        assert entry.token_ids[0] == PROMPT[position]
        assert entry.logprobs[0] == pytest.approx(float(plain[position - 1, PROMPT[position]]), abs=1e-4)
        assert entry.token_ids[1:] == plain[position - 1].argsort(descending=True)[:width].tolist()


def test_scoring_without_sampling(driver):
    d = driver((None,))
    d.add(0, PROMPT, prompt_logprobs=0)
    d.sequences[0].tokens.append(0)  # so that the row does not reach its end
    result = d.step({0: len(PROMPT)})
    assert result.token_ids.tolist() == [-1]
    assert len(result.prompt_logprobs[0]) == len(PROMPT) - 1


def test_a_row_with_unusable_logits_fails_alone(driver):
    d = driver((None,))
    d.model.poisoned = 39
    d.add(0, PROMPT)
    d.add(1, [4, 39])
    d.add(2, PROMPT[:5])
    result = d.step({0: 11, 1: 2, 2: 5})
    assert result.failed == {1: FAILURES[NOT_FINITE]}
    assert result.token_ids[1] == -1
    d.check(0, result.logprobs[0])
    d.check(2, result.logprobs[2])
    d.remove(1)
    result = d.step({2: 1, 0: 1})
    d.check(2, result.logprobs[0])


def test_unusable_logits_while_scoring_fail_the_row(driver):
    d = driver((None,))
    d.model.poisoned = 39
    d.add(0, [4, 39, 5, 6], prompt_logprobs=0)
    result = d.step({0: 3})
    assert result.failed == {0: FAILURES[NOT_FINITE]}


def test_a_step_without_rows_applies_its_changes(driver):
    d = driver((None,))
    d.add(0, PROMPT)
    d.step({0: 11})
    d.remove(0)
    assert d.step({}).token_ids.tolist() == []


def test_the_next_plan_may_refer_to_a_token_that_the_host_has_not_seen(driver):
    d = driver((None,))
    d.add(0, PROMPT)
    d.step({0: 11})
    d.sequences[0].tokens[-1] = -1  # the driver's copy is a placeholder; the runner has the token itself
    token = int(d.runner._batch.token_ids[0, 11])
    result = d.step({0: 1})
    expected = d.model.dense([*PROMPT, token])[-1].log_softmax(-1)
    assert result.logprobs[0].logprobs[0] == pytest.approx(float(expected.max()), abs=1e-4)


def test_the_last_position_of_the_longest_sequence(driver):
    d = driver((None,))
    prompt = torch.randint(0, 40, (95,), generator=torch.Generator().manual_seed(0)).tolist()
    d.add(7, prompt)
    result = d.step({7: 95})
    d.check(7, result.logprobs[0])
