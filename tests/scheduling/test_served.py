"""Policies are told what each step has done."""

from __future__ import annotations

from collections import Counter

import pytest

from llmkit.testing.scheduling import SchedulingHarness
from llmkit_schedulers.fcfs import FcfsPolicy


class Bookkeeper(FcfsPolicy):
    def __init__(self):
        super().__init__()
        self.calls = []
        self.prompt, self.output = Counter(), Counter()

    def served(self, requests, num_prompt_tokens, num_output_tokens):
        self.calls.append(len(requests))
        for view, prompt, output in zip(requests, num_prompt_tokens, num_output_tokens, strict=True):
            assert prompt or output
            self.prompt[view.request_id, view.index] += prompt
            self.output[view.request_id, view.index] += output


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_token_is_told_once(depth):
    run = SchedulingHarness(policy := Bookkeeper(), max_num_batched_tokens=5, max_concurrent_steps=depth, num_blocks=60)
    run.add("a", [1] * 12, 6)
    run.add("b", [2] * 3, 9, n=2)
    steps = run.run()
    assert policy.output == {key: len(answer.token_ids) for key, answer in run.answers.items()}
    # The last prompt token is computed again for a fork.
    assert policy.prompt == {("a", 0): 12, ("b", 0): 3, ("b", 1): 1}
    assert len(policy.calls) <= steps


def test_cached_prompt_tokens_are_not_among_them():
    run = SchedulingHarness(policy := Bookkeeper())
    run.add("a", [1] * 12, 1)
    run.run()
    run.add("b", [1] * 12, 1)
    run.run()
    assert policy.prompt == {("a", 0): 12, ("b", 0): 4}


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_computed_again_counts_again(depth, preemption):
    policy = Bookkeeper()
    policy.preemption = preemption
    run = SchedulingHarness(
        policy, num_blocks=8, num_host_blocks=30, max_concurrent_steps=depth, enable_prefix_caching=False
    )
    for i in range(3):
        run.add(f"r{i}", [i] * 6, 14)
    run.run()
    assert run.core.stats().num_preemptions
    assert policy.output == {(f"r{i}", 0): 14 for i in range(3)}
    assert (sum(policy.prompt.values()) > 18) == (preemption == "recompute")


def test_tokens_of_requests_that_have_ended_are_not_told():
    run = SchedulingHarness(policy := Bookkeeper(), max_concurrent_steps=2)
    run.add("a", [1] * 5, 20)
    run.add("b", [2] * 5, 20)
    for _ in range(3):
        run.step()
    run.core.abort(["a"])
    told = policy.output["a", 0]
    run.run()
    assert policy.output == {("a", 0): told, ("b", 0): 20}


def test_a_policy_that_raises_loses_nothing():
    class Failing(Bookkeeper):
        def served(self, requests, num_prompt_tokens, num_output_tokens):  # noqa: ARG002
            requests.clear()
            raise KeyError("a")

    run = SchedulingHarness(Failing())
    run.add("a", [1] * 5, 8)
    run.run()
    run.check_answers()
    assert run.core.stats().num_policy_faults > 0


def test_a_policy_that_does_not_ask_is_not_called():
    calls = {}
    run = SchedulingHarness(FcfsPolicy())
    run.scheduler.queue._calls = calls
    run.add("a", [1], 4)
    run.run()
    assert "served" not in calls
    assert "peek" in calls
