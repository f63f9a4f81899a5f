"""A device that has no memory for a step: smaller steps, nothing lost."""

from __future__ import annotations

import pytest

from llmkit.errors import OutOfMemoryError
from llmkit.scheduling.token_budget import STEPS_UNTIL_MORE, TokenBudget
from llmkit.testing.scheduling import SchedulingHarness
from llmkit_schedulers.fcfs import FcfsPolicy


def memory_for(tokens):
    """Fails every step of more tokens, as a device without memory would."""

    def before_step(plan):
        if plan.num_tokens > tokens:
            raise OutOfMemoryError("no memory for the activations")

    return before_step


def loaded(before_step, *, swap=False, **settings):
    policy = FcfsPolicy()
    if swap:
        policy.preemption = "swap"
    run = SchedulingHarness(policy, before_step=before_step, **settings)
    for number, n in enumerate((1, 3, 1, 1)):
        run.add(f"r{number}", [number] * (9 + 5 * number), 8, n=n)
    return run


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("tokens", [1, 3, 10])
@pytest.mark.parametrize(
    "settings",
    [{}, {"num_blocks": 12}, {"num_blocks": 12, "num_host_blocks": 30, "swap": True}, {"enable_prefix_caching": False}],
)
def test_every_answer_is_what_it_would_have_been(tokens, depth, settings):
    run = loaded(memory_for(tokens), max_concurrent_steps=depth, **settings)
    run.run()
    run.check_answers()
    assert {answer.finish_reason for answer in run.answers.values()} == {"length"}
    stats = run.core.stats()
    assert stats.num_out_of_memory > 0
    assert stats.num_failed_steps == 0
    assert stats.token_budget < 64


def test_a_prompt_that_must_not_be_cut_is_cut_where_memory_is_short():
    run = SchedulingHarness(
        FcfsPolicy(), before_step=memory_for(10), enable_chunked_prefill=False, max_num_batched_tokens=128
    )
    run.add("a", [1] * 40, 4)
    run.run()
    run.check_answers()


def test_a_step_that_cannot_be_smaller_fails():
    run = loaded(memory_for(0))
    run.run()
    assert {answer.finish_reason for answer in run.answers.values()} == {"error"}
    assert "OutOfMemoryError: no memory" in run.answers["r0", 0].error


def test_what_torch_raises_is_known_too():
    import torch

    def before_step(plan):
        if plan.num_tokens > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")

    run = loaded(before_step)
    run.run()
    run.check_answers()
    assert run.core.stats().num_out_of_memory > 0


def test_embeddings_and_scores_are_whole():
    run = SchedulingHarness(FcfsPolicy(), before_step=memory_for(5), max_num_batched_tokens=16)
    run.add("scored", list(range(20)), 2, prompt_logprobs=1)
    run.add("mean", list(range(20)), 0, pooling="mean")
    run.run()
    run.check_answers()
    assert len(run.answers["scored", 0].prompt_logprobs) == 20


def test_the_budget_comes_back():
    budget = TokenBudget(64)
    assert budget.shrink(40)
    assert budget.limit == 20
    for _ in range(STEPS_UNTIL_MORE - 1):
        budget.went_well()
    assert budget.limit == 20
    budget.went_well()
    assert budget.limit == 40
    for _ in range(STEPS_UNTIL_MORE):
        budget.went_well()
    assert budget.limit == 64
    assert not budget.shrink(1)
