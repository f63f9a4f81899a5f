"""Sleep and views of the engine, with a fake model."""

from __future__ import annotations

import pytest

from llmkit.engine.utilities import run_utility
from llmkit.errors import EngineError, InvalidRequestError
from llmkit.testing.fake_executor import FakeExecutor
from llmkit.testing.scheduling import SchedulingHarness
from llmkit_schedulers.fcfs import FcfsPolicy


def busy(depth=1, *, swap=False, **settings):
    policy = FcfsPolicy()
    if swap:
        policy.preemption = "swap"
    run = SchedulingHarness(policy, max_concurrent_steps=depth, **settings)
    for number, n in enumerate((1, 3, 1)):
        run.add(f"r{number}", [number] * (6 + 5 * number), 12, n=n)
    for _ in range(4):
        run.step()
    return run


def call(run, method, *arguments):
    return run_utility(run, method, arguments)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("settings", [{}, {"num_blocks": 12, "num_host_blocks": 30, "swap": True}])
def test_requests_wait_and_answers_stay_the_same(depth, level, settings):
    run = busy(depth, **settings)
    call(run, "sleep", level)
    assert call(run, "is_sleeping")
    assert run.core.stats().sleep_level == level
    run.add("late", [9] * 5, 4)
    while run.core.has_work():
        run.step()  # tells what the last steps had sampled, and does nothing else
    assert run.executor.asleep == level
    assert run.core.stats().num_unfinished >= 4
    if level:
        stats = run.core.stats()
        assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_blocks)
        assert stats.num_free_host_blocks == stats.num_host_blocks
    call(run, "wake_up")
    assert not call(run, "is_sleeping")
    run.run()
    run.check_answers()
    assert {answer.finish_reason for answer in run.answers.values()} == {"length"}


def test_aborted_while_asleep():
    run = busy()
    call(run, "sleep", 1)
    run.core.abort([f"r{i}" for i in range(3)])
    call(run, "wake_up")
    run.run()
    run.add("new", [1] * 9, 3)
    run.run()
    run.check_answers()


def test_parts_wake_one_after_the_other():
    run = busy()
    call(run, "sleep", 2)
    with pytest.raises(EngineError, match="wake them first"):
        call(run, "wake_up", ["kv_cache"])
    call(run, "wake_up", ["weights"])
    assert call(run, "is_sleeping")
    assert not run.core.has_work()
    call(run, "wake_up", ["kv_cache"])
    assert not call(run, "is_sleeping")
    run.run()
    run.check_answers()


def test_deeper_and_again():
    run = busy()
    for level, expected in ((0, 0), (0, 0), (2, 2), (1, 2)):
        call(run, "sleep", level)
        assert run.core.stats().sleep_level == expected
    call(run, "wake_up", None)
    call(run, "wake_up", None)  # nothing sleeps: nothing happens
    run.run()
    run.check_answers()


def test_a_part_that_cannot_wake_sleeps_on(monkeypatch):
    run = busy()
    call(run, "sleep", 1)
    with monkeypatch.context() as patch:
        patch.setattr(run.executor, "wake_up", lambda part: 1 / (part == "weights"))
        with pytest.raises(ZeroDivisionError):
            call(run, "wake_up")
    assert run.core.sleeper.parts == {"kv_cache", "scheduling"}
    call(run, "wake_up")
    run.run()
    run.check_answers()


@pytest.mark.parametrize("level", [3, -1, True, "1"])
def test_bad_levels(level):
    run = busy()
    with pytest.raises(InvalidRequestError, match="level must be 0, 1 or 2"):
        call(run, "sleep", level)
    run.run()


def test_bad_tags():
    run = busy()
    call(run, "sleep", 1)
    with pytest.raises(InvalidRequestError, match="tags may be weights, kv_cache, scheduling"):
        call(run, "wake_up", ["weights", "lora"])
    assert "weights" in run.core.sleeper.parts


def test_an_executor_that_cannot_sleep_can_be_paused(monkeypatch):
    run = busy()
    monkeypatch.delattr(FakeExecutor, "sleep")
    with pytest.raises(EngineError, match="FakeExecutor cannot give back memory"):
        call(run, "sleep", 1)
    assert not call(run, "is_sleeping")
    call(run, "sleep", 0)
    call(run, "wake_up")
    run.run()
    run.check_answers()


class TestViews:
    def test_every_block_is_free_cached_in_use_or_shared(self):
        run = SchedulingHarness(FcfsPolicy(), num_blocks=32, block_size=4)
        assert call(run, "kv_map").counts() == {"free": 32, "cached": 0, "in_use": 0, "shared": 0}
        run.add("a", [1] * 8 + [2], 3)
        run.run()
        counts = call(run, "kv_map").counts()
        assert (counts["free"], counts["cached"]) == (30, 2)
        run.add("b", [1] * 8 + [2], 20)
        run.add("c", [1] * 8 + [3], 20)
        for _ in range(3):
            run.step()
        blocks = call(run, "kv_map")
        assert blocks.counts() == {"free": 28, "cached": 0, "in_use": 2, "shared": 2}
        assert (len(blocks.states), blocks.block_size) == (32, 4)
        run.run()

    def test_summaries_of_steps(self):
        run = busy(max_num_batched_tokens=16)
        run.run()
        steps = call(run, "recent_steps")
        assert sum(step.num_tokens for step in steps) == run.executor.num_tokens_computed
        assert all(0 < step.num_tokens <= step.token_budget == 16 for step in steps)
        assert (steps[-1].num_running, steps[-1].num_waiting) == (0, 0)
        assert call(run, "recent_steps", steps[-3].step) == steps[-2:]
