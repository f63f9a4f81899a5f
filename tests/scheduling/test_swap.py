"""Preemption by swap: victims' blocks go to the host and come back."""

from __future__ import annotations

import logging
import random

import pytest

from llmkit.errors import PluginError
from llmkit.scheduling.guarded_queue import GuardedQueue
from llmkit.testing.memory_connector import MemoryConnector, MemoryStore
from llmkit.testing.scheduling import SchedulingHarness
from llmkit_schedulers.fcfs import FcfsPolicy


class Swapping(FcfsPolicy):
    preemption = "swap"


class Apart(Swapping):
    mixes_prefill_and_decode = False


def crowd(policy=None, *, requests=3, **settings):
    """Three requests that together do not fit."""
    run = SchedulingHarness(policy or Swapping(), **{"num_blocks": 8, "num_host_blocks": 30} | settings)
    for i in range(requests):
        run.add(f"r{i}", [i] * 6, 14)
    return run


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("windows", [(None,), (None, 6)])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("policy", [Swapping, Apart])
def test_answers_are_the_same_and_nothing_is_computed_twice(policy, caching, windows, depth):
    run = crowd(
        policy(),
        num_blocks=8 * len(windows),
        windows=windows,
        enable_prefix_caching=caching,
        max_concurrent_steps=depth,
    )
    run.run()
    run.check_answers()
    stats = run.core.stats()
    assert stats.num_swaps == stats.num_preemptions > 0
    assert stats.num_swaps_missed == 0
    assert run.executor.num_swapped_in
    assert run.executor.num_tokens_computed == 3 * (6 + 13)


def test_own_blocks_that_are_still_cached_are_not_copied_back():
    run = crowd()
    run.run()
    assert run.executor.num_swapped_in < run.executor.num_swapped_out


def test_a_full_host_means_recomputation_and_is_counted():
    run = crowd(num_host_blocks=1)
    run.run()
    run.check_answers()
    stats = run.core.stats()
    assert stats.num_swaps == 0
    assert stats.num_swaps_missed == stats.num_preemptions > 0


def test_without_swap_space_a_policy_that_wants_it_works_and_one_line_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        run = crowd(num_host_blocks=0)
    run.run()
    run.check_answers()
    assert len(caplog.records) == 1
    assert "Swapping preempts by swap, but there is no swap space (kv_cache.swap_space_gib)" in caplog.text
    assert run.core.stats().num_swaps_missed > 0


def test_other_ways_to_preempt_are_refused():
    class Throwing(FcfsPolicy):
        preemption = "throw away"

    with pytest.raises(PluginError, match="Throwing asks for preemption 'throw away'"):
        GuardedQueue(Throwing())


@pytest.mark.parametrize("policy", [Swapping, Apart])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_whatever_step_fails_nobody_goes_on_with_what_it_was_to_copy(policy, depth):
    """The fake cache forgets what a failed step was to copy, and every answer is checked."""
    lost = 0
    for failing in range(40):

        def before_step(plan, failing=failing):
            if plan.step == failing:
                raise RuntimeError("device lost")

        run = crowd(
            policy(), requests=4, before_step=before_step, max_concurrent_steps=depth, enable_prefix_caching=False
        )
        run.run()
        run.check_answers()
        lost += run.core.stats().num_swaps_missed
    assert lost


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("steps", range(1, 24))
def test_abort_at_any_moment_gives_all_back(steps, depth):
    run = crowd(max_concurrent_steps=depth)
    for _ in range(steps):
        run.step()
    for name in ("r2", "r1"):
        run.core.abort([name])
        run.scheduler.check_integrity()
    run.run()
    run.check_answers()


@pytest.mark.parametrize("depth", [1, 2])
def test_resetting_the_prefix_cache_forgets_what_is_on_the_host(depth):
    run = crowd(max_concurrent_steps=depth)
    while not run.core.stats().num_swaps:
        run.step()
    assert not run.core.reset_prefix_cache()
    assert run.core.stats().num_swaps_missed == 0
    run.core.abort(["r0", "r1"])
    assert run.core.reset_prefix_cache()
    stats = run.core.stats()
    assert stats.num_swaps_missed == 1
    assert stats.num_free_host_blocks == stats.num_host_blocks
    run.run()
    run.check_answers()


def test_one_that_is_alone_and_does_not_fit_as_it_was_is_computed_again(monkeypatch):
    run = crowd()
    monkeypatch.setattr(run.scheduler.manager, "swap_in", lambda *_: False)
    run.run()
    run.check_answers()
    stats = run.core.stats()
    assert stats.num_swaps_missed == stats.num_swaps > 0


def test_a_prompt_that_others_have_computed_meanwhile_is_not_copied_back():
    prompt = [i % 5 for i in range(40)]

    class VictimA(Swapping):
        def victim(self, running, needing):  # noqa: ARG002
            return next((view for view in running if view.request_id == "a"), None)

        def admit(self, request, load):  # noqa: ARG002
            return request.request_id != "a" or not request.num_preemptions

        def key(self, request):
            return request.num_preemptions

    run = SchedulingHarness(VictimA(), num_blocks=16, num_host_blocks=60, max_num_batched_tokens=8)
    run.add("filler", [99] * 30, 20)
    run.add("a", prompt, 4)
    while not run.core.stats().num_swaps:
        run.step()
    run.core.abort(["filler"])
    run.add("b", prompt, 4)
    run.run()
    run.check_answers()
    assert run.executor.num_swapped_out
    assert not run.executor.num_swapped_in


@pytest.mark.parametrize("depth", [1, 2])
def test_prompt_scores_are_told_once(depth):
    run = SchedulingHarness(
        Swapping(), num_blocks=8, num_host_blocks=30, max_num_batched_tokens=5, max_concurrent_steps=depth
    )
    for i in range(3):
        run.add(f"r{i}", [i] * 6, 14, prompt_logprobs=0)
    run.run()
    run.check_answers()
    assert run.core.stats().num_swaps
    for i in range(3):
        told = [entry and entry.token_ids[0] for entry in run.answers[f"r{i}", 0].prompt_logprobs]
        assert told == [None, *[i] * 5]


@pytest.mark.parametrize("depth", [1, 2])
def test_forks_are_swapped_one_by_one(depth):
    run = SchedulingHarness(Swapping(), num_blocks=10, num_host_blocks=60, max_concurrent_steps=depth)
    run.add("a", list(range(11)), 16, n=4, seed=3)
    run.run()
    run.check_answers()
    assert run.core.stats().num_swaps


def test_a_block_that_is_copied_for_a_fork_is_not_filled_from_the_host_before():
    """The last fork of a leader that has ended and a swapped request enter with one plan: the leader's last block is
    free then, but it is read by that plan."""
    run = SchedulingHarness(
        Swapping(), num_blocks=6, block_size=2, max_num_batched_tokens=4, max_num_seqs=3, num_host_blocks=12,
        enable_prefix_caching=False,
    )  # fmt: skip
    run.add("forked", [0, 1, 1, 1, 0, 0], 2, n=2)
    run.add("swapped", [0, 0, 0, 1, 0, 0, 0], 2)
    run.run()
    assert run.executor.num_swapped_in
    run.check_answers()


def test_prefill_and_decode_stay_apart_when_a_swapped_request_comes_back():
    plans = []
    run = crowd(Apart(), before_step=plans.append, requests=4)
    run.run()
    assert any(plan.swaps_in for plan in plans)
    for plan in plans:
        decodes = {int(computed) >= 6 for computed in plan.num_computed}
        assert len(decodes) == 1, "a step with prefill and decode"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("policy", [Swapping, Apart])
def test_with_a_connector_whose_loads_fail_now_and_then(policy, asynchronous):
    num_swaps = num_loads = num_failed = 0
    for seed in range(8):
        draw = random.Random(seed)
        store = MemoryStore(fails=lambda _, draw=draw: draw.random() < 0.2)
        run = SchedulingHarness(
            policy(),
            num_blocks=9,
            num_host_blocks=30,
            windows=((None,), (None, 5))[seed % 2],
            max_num_batched_tokens=16,
            connector=MemoryConnector(store, asynchronous=asynchronous, delay=1),
        )
        for i in range(12):
            first = draw.randint(0, 3)
            run.add(f"r{i}", [first, 9] * draw.randint(3, 8), 10)
            for _ in range(draw.randint(0, 9)):
                run.step()
        run.run()
        run.check_answers()
        stats = run.core.stats()
        num_swaps += stats.num_swaps
        num_loads += stats.num_loads
        num_failed += stats.num_failed_loads
    assert num_swaps
    assert num_loads > num_failed > 0
