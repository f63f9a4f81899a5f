from __future__ import annotations

import os
import sys
from functools import cache
from typing import ClassVar

import numpy as np
import pytest

from llmkit.engine.core import EngineCore
from llmkit.errors import EngineClosedError
from llmkit.scheduling.plan import StepResult
from llmkit.testing.fake_executor import VOCABULARY
from llmkit.testing.memory_connector import MemoryConnector, MemoryStore
from llmkit.testing.scheduling import SchedulingHarness
from llmkit_schedulers.fcfs import FcfsPolicy

DEEP = os.environ.get("LLMKIT_DEEP_TESTS") == "1"


def failing_at(step, error=None):
    def before_step(plan):
        if plan.step == step:
            raise error or RuntimeError("device lost")

    return before_step


class TestFailures:
    @pytest.mark.parametrize("depth", [1, 2])
    def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(self, depth):
        run = SchedulingHarness(FcfsPolicy(), max_num_seqs=2, before_step=failing_at(2), max_concurrent_steps=depth)
        for name in ("a", "b", "c", "d"):
            run.add(name, [ord(name)] * 3, 4)
        run.run()
        reasons = {name: run.answers[name, 0].finish_reason for name in ("a", "b", "c", "d")}
        assert reasons == {"a": "error", "b": "error", "c": "length", "d": "length"}
        assert run.answers["a", 0].error == "The step failed: RuntimeError: device lost"
        run.check_answers()
        assert run.core.stats().num_failed_steps == 1

    def test_nothing_of_a_failed_step_is_found_in_the_cache(self):
        run = SchedulingHarness(FcfsPolicy(), before_step=failing_at(0))
        run.add("a", [1] * 12, 4)
        run.run()
        run.add("b", [1] * 12, 4)
        run.run()
        run.check_answers()
        assert run.answers["b", 0].num_cached_tokens == 0

    def test_a_failed_row_fails_alone(self):
        run = SchedulingHarness(FcfsPolicy(), failing_rows=lambda plan: {1: "NaN"} if plan.step == 1 else {})
        for name in ("a", "b", "c"):
            run.add(name, [1] * 3, 4)
        run.run()
        assert [run.answers[name, 0].finish_reason for name in ("a", "b", "c")] == ["length", "error", "length"]
        run.check_answers()

    def test_a_refused_submission_is_a_failed_step(self, monkeypatch):
        run = SchedulingHarness(FcfsPolicy())
        run.add("a", [1], 4)
        with monkeypatch.context() as patch:
            patch.setattr(run.executor, "submit", lambda _: 1 / 0)
            outputs = run.core.step()
        assert outputs[0].finish_reason == "error"
        assert "ZeroDivisionError" in outputs[0].error
        assert not run.core.has_work()

    @pytest.mark.parametrize("tokens", [[], [1, 2, 3], [-1], [1.5], [[1]]])
    def test_a_result_that_does_not_fit_is_a_failure(self, monkeypatch, tokens):
        class Handle:
            def result(self):
                return StepResult(np.array(tokens) if tokens else np.array([], np.int32))

        run = SchedulingHarness(FcfsPolicy())
        run.add("a", [1], 4)
        monkeypatch.setattr(run.executor, "submit", lambda _: Handle())
        outputs = run.core.step()
        assert [output.finish_reason for output in outputs] == ["error"]
        assert not run.core.has_work()
        run.scheduler.check_integrity()

    def test_a_token_beyond_the_vocabulary_ends_its_request_alone(self, monkeypatch):
        run = SchedulingHarness(FcfsPolicy())
        for name in "abc":
            run.add(name, [1], 3)
        run.core.step()
        execute = run.executor._execute

        def with_odd_token(plan):
            result = execute(plan)
            result.token_ids[1] = VOCABULARY
            return result

        monkeypatch.setattr(run.executor, "_execute", with_odd_token)
        outputs = run.core.step()
        assert [output.finish_reason for output in outputs] == [None, "error", None]
        assert f"token {VOCABULARY} " in outputs[1].error
        assert not outputs[1].new_token_ids
        monkeypatch.undo()
        assert {output.request_id for output in run.core.step()} == {"a", "c"}
        run.scheduler.check_integrity()

    def test_a_first_token_beyond_the_vocabulary_is_no_token(self, monkeypatch):
        run = SchedulingHarness(FcfsPolicy())
        run.add("a", [1], 3)
        handle = run.executor.submit

        class Odd:
            def __init__(self, plan):
                self.handle = handle(plan)

            def result(self):
                result = self.handle.result()
                result.token_ids[:] = 2**31 - 1
                return result

        monkeypatch.setattr(run.executor, "submit", Odd)
        (output,) = run.core.step()
        assert output.finish_reason == "error"
        assert not run.core.has_work()

    def test_a_result_of_another_type_is_a_failed_step(self, monkeypatch):
        class Handle:
            def result(self):
                return None

        run = SchedulingHarness(FcfsPolicy())
        run.add("a", [1], 4)
        monkeypatch.setattr(run.executor, "submit", lambda _: Handle())
        (output,) = run.core.step()
        assert "NoneType" in output.error

    def test_an_interrupt_leaves_a_usable_engine(self):
        run = SchedulingHarness(FcfsPolicy(), before_step=failing_at(1, KeyboardInterrupt()))
        run.add("a", [1], 4)
        run.step()
        with pytest.raises(KeyboardInterrupt):
            run.core.step()
        run.step()
        assert run.answers["a", 0].finish_reason == "error"
        run.run()


class _Interrupt(BaseException):
    """What a signal handler raises, wherever it strikes."""


def called_by_a_connector(frame):
    """An interrupt there may lose what the connector alone knows; its blocks stay held then, as it may use them."""
    while frame is not None and "/testing/memory_connector" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


@cache
def is_ours(path):
    return any(part in path for part in ("/scheduling/", "/kv_cache/", "/engine/core"))


def interrupted(function, at):
    """Call `function`, interrupted at the `at`-th line that it executes in the scheduler, the cache or the core.
    Returns whether it was, and how many lines there were."""
    lines = 0

    def called(frame, _event, _):
        return counted if is_ours(frame.f_code.co_filename) and not called_by_a_connector(frame) else None

    def counted(_frame, event, _):
        nonlocal lines
        if event == "line":
            lines += 1
            if lines == at:
                sys.settrace(None)
                raise _Interrupt
        return counted

    sys.settrace(called)
    try:
        function()
    except _Interrupt:
        return True, lines
    finally:
        sys.settrace(None)
    return False, lines


class TestInterruptsAnywhere:
    """An interrupt may strike anywhere: no request may get a wrong answer, wait for ever or keep blocks."""

    STEPS = 4
    STRIDE = 28
    LIMITS: ClassVar = {"num_blocks": 10, "max_num_seqs": 3, "max_num_batched_tokens": 16}

    def policy(self):
        return FcfsPolicy()

    def engine(self, depth):
        run = SchedulingHarness(self.policy(), max_concurrent_steps=depth, **self.LIMITS)
        for number, n in enumerate((1, 3, 1)):
            run.add(f"old{number}", [number % 2] * (5 + number), 6, n=n)
        return run

    def advance(self, run):
        for _ in range(self.STEPS):
            run.core.step()

    # Both depths go through the same lines of the source: by default each is struck at other ones that it executes.
    @pytest.mark.parametrize(
        ("first", "depth"), [(i, depth) for i in range(7) for depth in (1, 2) if DEEP or (i + depth) % 2]
    )
    def test_every_request_ends_and_the_next_ones_are_answered(self, depth, first):
        _, lines = interrupted(lambda: self.advance(self.engine(depth)), 10**9)
        for line in range(1 + first * self.STRIDE // 7, lines, self.STRIDE):
            run = self.engine(depth)
            was_interrupted, _ = interrupted(lambda run=run: self.advance(run), line)
            if not was_interrupted:
                break  # fewer lines than the first time, when things were still to be set up
            self.check_that_it_goes_on(run, line)

    def check_that_it_goes_on(self, run, line):
        for _ in range(20):
            run.core.step()
        stats = run.core.stats()
        assert not run.core.has_work(), line
        assert (stats.num_unfinished, stats.num_free_blocks) == (0, stats.num_blocks), line
        assert stats.num_free_host_blocks == stats.num_host_blocks, line
        run.scheduler.check_integrity()
        run.executor.violations.clear()
        run.requests.clear(), run.answers.clear(), run.finished.clear()
        for number, n in enumerate((1, 3)):
            run.add(f"new{number}", [number % 2] * (5 + number), 6, n=n)
        run.run()
        run.check_answers()
        assert run.core.stats().num_policy_faults <= 1, line  # a request that the policy has and nobody else

    @pytest.mark.parametrize("depth", [1, 2])
    def test_an_impatient_user_interrupts_what_puts_things_in_order(self, depth, monkeypatch):
        def twice(message):  # noqa: ARG001
            raise _Interrupt

        for line in range(1, 10**6, 11):
            run = self.engine(depth)
            run.core.step()
            with monkeypatch.context() as patch:
                patch.setattr(run.scheduler, "start_over", twice)
                patch.setattr(run.executor, "submit", twice)
                with pytest.raises(_Interrupt):
                    run.core.step()
            assert run.core.has_work()
            was_interrupted, _ = interrupted(run.core.step, line)
            if not was_interrupted:
                break
            self.check_that_it_goes_on(run, line)
        assert line > 100

    def test_an_id_can_be_used_again_at_once(self):
        """The end that nobody was told of must not reach the new request of the same name."""
        run = SchedulingHarness(FcfsPolicy(), before_step=failing_at(1, KeyboardInterrupt()))
        run.add("a", [1], 4)
        run.step()
        with pytest.raises(KeyboardInterrupt):
            run.core.step()
        run.core.abort(["a"])
        assert not run.core.has_work()
        run.finished.clear()
        run.add("a", [1], 4)
        run.run()
        assert run.answers["a", 0].finish_reason == "length"


class TestInterruptsWithAConnector(TestInterruptsAnywhere):
    """What was planned but never reached the workers, or was reported to nobody, holds no block for ever."""

    STRIDE = 14 if DEEP else 56

    def engine(self, depth):
        store = MemoryStore()
        first = self.harness(store, depth)
        for number, n in enumerate((1, 1)):
            first.add(f"before{number}", [number % 2] * (9 + number), 6, n=n)
        first.run()
        run = self.harness(store, depth)
        for number, n in enumerate((1, 3, 1)):
            run.add(f"old{number}", [number % 2] * (13 + number), 6, n=n)
        return run

    def harness(self, store, depth):
        connector = MemoryConnector(store, asynchronous=True, delay=1)
        return SchedulingHarness(self.policy(), max_concurrent_steps=depth, connector=connector, **self.LIMITS)

    def check_that_it_goes_on(self, run, line):
        for _ in range(20):
            run.core.step()
        assert run.core.settle_transfers(5.0), line
        assert not run.connector.breaker.num_faults, (line, run.connector.breaker.last_fault)
        super().check_that_it_goes_on(run, line)

    @pytest.mark.parametrize("depth", [1, 2])
    def test_a_plan_that_the_workers_never_see(self, depth, monkeypatch):
        run = self.engine(depth)
        with monkeypatch.context() as patch:
            patch.setattr(run.core, "on_plan", self.interrupt_if_something_is_held)
            with pytest.raises(_Interrupt):
                self.advance(run)
        self.check_that_it_goes_on(run, 0)

    @staticmethod
    def interrupt_if_something_is_held(plan):
        if plan.transfers is not None and plan.transfers.holds:
            raise _Interrupt


class TestInterruptsWhileSwapping(TestInterruptsAnywhere):
    """The same with blocks on their way to the host and back."""

    STEPS = 8
    STRIDE = 140
    LIMITS: ClassVar = {"num_blocks": 6, "max_num_seqs": 3, "max_num_batched_tokens": 16, "num_host_blocks": 12}

    def policy(self):
        policy = FcfsPolicy()
        policy.preemption = "swap"
        return policy

    @pytest.mark.parametrize("depth", [1, 2])
    def test_blocks_are_swapped_in_this_scenario(self, depth):
        run = self.engine(depth)
        self.advance(run)
        assert run.executor.num_swapped_out
        assert run.executor.num_swapped_in


class TestObservers:
    class Recorder:
        def __init__(self):
            self.steps = []
            self.finished = []

        def llmkit_step_finished(self, stats):
            self.steps.append(stats)

        def llmkit_request_finished(self, request):
            self.finished.append(request)

    def test_they_hear_of_steps_and_ends(self):
        run = SchedulingHarness(FcfsPolicy(), max_num_batched_tokens=4)
        recorder = self.Recorder()
        run.core = EngineCore(run.scheduler, run.executor, observers=(recorder, run, object()))
        run.add("a", [1, 2, 3, 4, 5, 6], 3, user="u", priority=2, arrival_time=1.0)
        run.run()
        assert [stats.num_tokens for stats in recorder.steps] == [4, 2, 1, 1]
        assert [stats.num_sampled for stats in recorder.steps] == [0, 1, 1, 1]
        assert [stats.num_running for stats in recorder.steps] == [1, 1, 1, 0]
        assert all(stats.plan_s >= 0 and stats.update_s >= 0 and not stats.failed for stats in recorder.steps)
        (finished,) = recorder.finished
        assert (finished.request_id, finished.user, finished.priority) == ("a", "u", 2)
        assert (finished.num_prompt_tokens, finished.num_output_tokens) == (6, 3)
        assert finished.finish_reasons == ("length",)
        metrics = finished.metrics
        assert metrics.arrival_time == 1.0
        assert metrics.first_scheduled_time <= metrics.first_token_time <= metrics.last_token_time
        assert metrics.last_token_time <= metrics.finished_time

    def test_one_that_raises_is_logged_and_harms_nobody(self, caplog):
        class Broken:
            def llmkit_step_finished(self, stats):  # noqa: ARG002
                raise ValueError("bad observer")

            def llmkit_request_finished(self, request):  # noqa: ARG002
                raise ValueError("bad observer")

        run = SchedulingHarness(FcfsPolicy())
        recorder = self.Recorder()
        run.core = EngineCore(run.scheduler, run.executor, observers=(Broken(), recorder, run))
        run.add("a", [1], 3)
        run.run()
        run.check_answers()
        assert len(recorder.steps) == 3
        assert "bad observer" in caplog.text

    def test_an_abort_is_an_end(self):
        run = SchedulingHarness(FcfsPolicy())
        run.add("a", [1], 3)
        run.step()
        run.core.abort(["a"])
        assert [request.finish_reasons for request in run.finished] == [("abort",)]


class TestLife:
    def test_idle(self):
        core = SchedulingHarness(FcfsPolicy()).core
        assert not core.has_work()
        assert core.step() == []

    def test_closed(self):
        run = SchedulingHarness(FcfsPolicy())
        run.add("a", [1], 3)
        run.core.close()
        run.core.close()
        assert run.executor.closed
        with pytest.raises(EngineClosedError):
            run.core.step()
        with pytest.raises(EngineClosedError):
            run.add("b", [1], 3)

    def test_depth_is_what_both_sides_allow(self):
        run = SchedulingHarness(FcfsPolicy(), max_concurrent_steps=2)
        run.executor.max_concurrent_steps = 1
        run.core = EngineCore(run.scheduler, run.executor, observers=(run,))
        run.add("a", [1], 3)
        run.run()
        run.check_answers()

    def test_reset_prefix_cache(self):
        run = SchedulingHarness(FcfsPolicy())
        run.add("a", [1] * 12, 2)
        run.step()
        assert not run.core.reset_prefix_cache()
        run.run()
        assert run.core.reset_prefix_cache()
        run.add("b", [1] * 12, 2)
        run.run()
        assert run.answers["b", 0].num_cached_tokens == 0

    def test_stats(self):
        run = SchedulingHarness(FcfsPolicy(), max_num_seqs=2)
        for i in range(3):
            run.add(f"r{i}", [i] * 4, 4)
        run.step()
        stats = run.core.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_unfinished, stats.num_steps) == (2, 1, 3, 1)
        assert stats.num_blocks - stats.num_free_blocks == 2
        assert stats.kv_usage == pytest.approx(2 / 32)
