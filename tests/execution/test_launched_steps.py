"""The runner of GPUs, on the CPU: steps submitted before the tokens of those before them are known."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from llmkit.execution.cuda import decode_graphs
from llmkit.execution.cuda.capture_sizes import LARGEST, capture_sizes, common_sizes, padded_rows, padded_width
from llmkit.execution.cuda.decode_graphs import Ending
from llmkit.sampling.device_draw import NOT_FINITE
from llmkit.sampling.sampler import FAILURES

PROMPT = [5, 17, 3, 3, 21, 8, 30, 11, 2, 14, 9]
SHAPES = [
    pytest.param({"windows": (None, None)}, id="one group"),
    pytest.param({"windows": (6, None, 6)}, id="full and sliding"),
    pytest.param({"windows": (None,), "block_size": 8, "page_size": 2}, id="block of four pages"),
]
MIXTURE: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.3, "seed": 2**63 + 11, "min_p": 0.1},
]
TRUNCATED: list[dict[str, Any]] = [
    {"temperature": 1.2, "seed": 3, "top_k": 7},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.3, "seed": 2**63 + 11, "top_p": 0.8, "min_p": 0.01},
]
PROCESSED: list[dict[str, Any]] = [
    {"temperature": 1.2, "seed": 4, "top_k": 20, "frequency_penalty": 0.8, "repetition_penalty": 1.3, "logprobs": 3},
    {"temperature": 0, "logit_bias": {7: 1.5}, "presence_penalty": 1.0},
    {"temperature": 0.9, "seed": 12, "allowed_token_ids": [3, 4, 5, 9, 11, 12], "logprobs": -1, "min_tokens": 8,
     "stops": [4, 9, 11]},
]  # fmt: skip
FORBIDDING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.5, "seed": 5, "bad_words": [[a, b] for a in range(40) for b in range(40) if (a + b) % 3]},
    {"temperature": 0.8, "seed": 8, "top_k": 9},
]


def answers(d: Any, *, ahead: int, steps: int = 20, mixture: list[dict[str, Any]] = MIXTURE) -> list[Any]:
    """Three sequences that enter one after another, with so many steps under way: their tokens, and the
    log-probabilities of all steps."""
    flights = []
    work: dict[int, int] = {}
    for step in range(steps):
        if step % 3 == 0 and step < 9:
            slot = 5 - step // 3
            params = dict(mixture[step // 3])
            d.add(slot, PROMPT[step // 3 :], **{"logprobs": None, **params})
            work = {**work, slot: len(PROMPT) - step // 3}
        flights.append(d.submit(work))
        work = dict.fromkeys(work, 1)
        if len(flights) > ahead:
            flights.pop(0).land()
    for flight in flights:
        flight.land()
    return [d.sequences[slot].tokens for slot in (5, 4, 3)]


def reported(d: Any, mixture: list[dict[str, Any]], ahead: int) -> tuple[list[Any], list[Any]]:
    """(tokens, entries of log-probabilities, rounded, by step)."""
    entries: list[Any] = []
    land = type(d).submit

    def submit(work: dict[int, int]) -> Any:
        flight = land(d, work)
        order = len(entries)
        entries.append(None)
        old = flight.land

        def landed() -> Any:
            result = old()
            entries[order] = {
                row: (entry.token_ids, [round(x, 4) for x in entry.logprobs], entry.ranks)
                for row, entry in sorted(result.logprobs.items())
            }
            return result

        flight.land = landed
        return flight

    d.submit = submit
    return answers(d, ahead=ahead, mixture=mixture), entries


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ahead", [0, 1])
def test_the_tokens_are_those_of_steps_one_after_another(driver, shape, ahead):
    expected = answers(driver(**shape), ahead=0)
    assert answers(driver(**shape, launched=True), ahead=ahead) == expected
    assert len({tuple(tokens[-5:]) for tokens in expected}) == 3


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("mixture", [TRUNCATED, PROCESSED, FORBIDDING], ids=["truncated", "processed", "forbidding"])
def test_whatever_a_row_asks_for_its_step_is_launched_ahead(driver, mixture, ahead):
    """With graphs' static inputs and without; the reference is the runner that waits."""
    tokens, entries = reported(driver(), mixture, 0)
    d = driver(launched=True)
    d.runner.execute = None  # what waits is not called
    assert reported(d, mixture, ahead) == (tokens, entries)
    assert any(entries) == (mixture is PROCESSED)
    if mixture is FORBIDDING:
        answer = tokens[1][len(PROMPT) - 1 :]
        assert len(answer) > 8
        assert all((a + b) % 3 == 0 for a, b in pairwise(answer)), "a forbidden pair of tokens"


def test_decode_steps_are_padded(driver):
    d = driver(launched=True)
    for slot in range(5):
        d.add(slot, PROMPT[slot:], logprobs=None)
    d.step({slot: len(PROMPT) - slot for slot in range(5)})
    d.step(dict.fromkeys(range(5), 1))
    assert d.model.steps[-1] == 8
    d.step(dict.fromkeys(range(3), 1))
    assert d.model.steps[-1] == 4


def test_what_was_planned_once_hears_of_each_step_s_lengths(driver):
    """Padding rows have one token; a step of other work is planned for itself."""
    d = driver(launched=True)
    heard: list[tuple[Any, list[int]]] = []
    d.runner._backend.follow = lambda metadata, lengths: heard.append((metadata, lengths.tolist()))
    for slot in range(3):
        d.add(slot, PROMPT[slot:], logprobs=None)
    d.step({slot: len(PROMPT) - slot for slot in range(3)})
    assert not heard
    d.step(dict.fromkeys(range(3), 1))
    d.step(dict.fromkeys(range(3), 1))
    metadata = [planned for planned, _ in heard]
    assert [lengths for _, lengths in heard] == [[12, 11, 10, 1]] * (len(heard) // 2) + [[13, 12, 11, 1]] * (
        len(heard) // 2
    )
    assert metadata[: len(heard) // 2] == metadata[len(heard) // 2 :], "the plan of the first step serves the second"


def test_a_step_with_other_wishes_waits_for_those_before_it(driver):
    d = driver(launched=True)
    d.add(0, PROMPT, logprobs=None)
    first = d.submit({0: len(PROMPT)})
    second = d.submit({0: 1})
    d.add(1, PROMPT[:4])  # wants logprobs
    third = d.submit({0: 1, 1: 4})
    for flight in (first, second):
        flight.land()
    d.check(1, third.land().logprobs[1])
    d.remove(1)
    d.step({0: 1})
    tokens = d.sequences[0].tokens
    assert tokens[len(PROMPT) :] == [
        int(d.model.dense(tokens[:end])[-1].argmax()) for end in range(len(PROMPT), len(tokens))
    ]


def test_a_result_read_late_spares_the_slot_s_next_sequence(driver):
    """The slot's sequence is replaced by one of the same length while its last token is on its way."""
    d = driver(launched=True)
    d.add(2, PROMPT, logprobs=None)
    old = d.submit({2: len(PROMPT)})
    d.remove(2)
    d.add(2, PROMPT[::-1], logprobs=None)
    first = d.submit({2: len(PROMPT)})
    old.land()
    second = d.submit({2: 1})
    first.land()
    second.land()
    tokens = d.sequences[2].tokens
    assert tokens[-2:] == [int(d.model.dense(tokens[:end])[-1].argmax()) for end in (-2, -1)]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7}])
def test_a_bad_row_fails_alone(driver, params):
    d = driver((None,), launched=True)
    d.model.poisoned = 39
    d.add(0, PROMPT, logprobs=None)
    d.add(1, [4, 39], logprobs=None, **params)
    result = d.step({0: 11, 1: 2})
    assert result.failed == {1: FAILURES[NOT_FINITE]}
    assert d.sequences[0].tokens[-1] == int(d.model.dense(PROMPT)[-1].argmax())


def test_a_prompt_in_chunks_samples_at_its_end(driver):
    d = driver(launched=True)
    d.add(0, PROMPT, logprobs=None)
    assert d.step({0: 6}).token_ids.tolist() == [-1]
    assert d.step({0: 5}).token_ids.tolist() == [int(d.model.dense(PROMPT)[-1].argmax())]


def test_results_can_be_read_again(driver):
    d = driver(launched=True)
    d.add(0, PROMPT, logprobs=None)
    flight = d.submit({0: len(PROMPT)})
    assert flight.handle.result() is flight.handle.result()


def test_capture_sizes():
    sizes = capture_sizes(1024)
    assert sizes[:6] == (1, 2, 4, 8, 16, 24)
    assert sizes[-3:] == (480, 496, LARGEST)
    assert {256, 272} <= set(sizes)
    assert capture_sizes(6) == (1, 2, 4, 6)
    for most in (1, 6, 100, 300, 5000):
        assert set(common_sizes(most)) <= set(capture_sizes(most))
        assert common_sizes(most)[-1] == capture_sizes(most)[-1]
    assert [padded_rows(rows, sizes) for rows in (1, 3, 9, 257, 512, 513)] == [1, 4, 16, 272, 512, None]
    assert [padded_width(pages, 3000) for pages in (1, 64, 65, 257, 1025)] == [64, 64, 256, 1024, 3000]


class Graph:
    """In the place of a captured graph: runs the step's kernels anew, into the same output."""

    def __init__(self, step: Any) -> None:
        self.step = step
        step.graph, step.output = self, step.body.launch()
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self.step.output.copy_(self.step.body.launch())


def test_graphs_of_common_sizes_are_there_first_and_a_frequent_size_gets_its_own(driver, monkeypatch):
    monkeypatch.setattr(decode_graphs, "WORTH_A_GRAPH", 3)
    d = driver(launched=True)
    graphs = d.runner._graphs
    graphs._captures, graphs._capture = True, Graph
    graphs._sizes, graphs._common = (1, 2, 3, 8), (1, 2, 8)
    graphs.warm_up()
    assert {(rows, ending) for rows, _, _, ending in graphs._steps} == {(rows, Ending.DRAWN) for rows in (1, 2, 8)}
    assert graphs.num_captured == 3
    assert not any(cache.any() for cache in d.runner.kv_caches), "padding was written"
    for slot in range(3):
        d.add(slot, PROMPT[slot:], logprobs=None)
    d.step({slot: len(PROMPT) - slot for slot in range(3)})
    for _ in range(6):
        d.step(dict.fromkeys(range(3), 1))
    width = next(iter(graphs._steps))[1]
    assert graphs._steps[8, width, (), Ending.DRAWN].graph.replays == 3
    assert graphs._steps[3, width, (), Ending.DRAWN].graph.replays == 2
    for slot in range(3):
        tokens = d.sequences[slot].tokens
        expected = d.model.dense(tokens)[len(PROMPT) - slot - 1 : -1].argmax(-1)
        assert expected.tolist() == tokens[len(PROMPT) - slot :]


def test_all_tensors_of_a_step_are_read_before_the_next_is_written(driver):
    """Two sequences whose decode steps alternate share the static inputs."""
    d = driver(launched=True)
    d.add(0, PROMPT, logprobs=None)
    d.add(1, PROMPT[::-1], logprobs=None)
    d.step({0: 11, 1: 11})
    flights = [d.submit({slot: 1}) for slot in (0, 1, 0, 1)]
    for flight in flights:
        flight.land()
    for slot in (0, 1):
        tokens = d.sequences[slot].tokens
        logits = d.model.dense(tokens)
        assert torch.equal(logits[len(PROMPT) - 1 : -1].argmax(-1), torch.tensor(tokens[len(PROMPT) :]))


def test_steps_whose_handles_are_lost_can_be_waited_for(driver):
    """After an interrupt, wherever it has struck: while tokens were awaited, or before a handle was noted down."""
    d = driver(launched=True)
    d.add(0, PROMPT, logprobs=None)
    first = d.submit({0: len(PROMPT)})
    d.submit({0: 1})
    settled, first.handle.settled = first.handle.settled, interrupt
    with pytest.raises(KeyboardInterrupt):
        first.handle.result()
    first.handle.settled = settled
    d.runner.settle()
    assert not d.runner._pending
    d.remove(0)
    d.add(1, PROMPT[:4])
    d.check(1, d.step({1: 4}).logprobs[0])


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
