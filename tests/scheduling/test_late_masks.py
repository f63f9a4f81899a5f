"""Masks that come late, or not at all, beside requests that wait for nothing."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from llmkit.requests.request import sequence_seed
from llmkit.scheduling.mask_threads import any_at_work
from llmkit.testing import hostile_grammars
from llmkit.testing.constrained import ManualService, alone, constrained, text_of
from llmkit.testing.scheduling import SchedulingHarness
from llmkit_schedulers.fcfs import FcfsPolicy


def harness(service: ManualService | None = None, **settings: Any) -> SchedulingHarness:
    return SchedulingHarness(FcfsPolicy(), grammars=service or ManualService(), **settings)  # type: ignore[arg-type]


@pytest.fixture
def hanging() -> Iterator[threading.Event]:
    """Set, it lets the grammars `!hang` go on; until then no mask of theirs comes."""
    hostile_grammars.go_on.clear()
    yield hostile_grammars.go_on
    hostile_grammars.go_on.set()


class TestLateMasks:
    def steps_until(self, run: SchedulingHarness, done: Callable[[], bool]) -> None:
        while not done():
            run.step()

    @pytest.mark.parametrize("depth", [1, 2])
    def test_nobody_else_waits_for_one(self, depth: int, hanging: threading.Event) -> None:
        run = harness(max_concurrent_steps=depth)
        run.add("late", [1], 8, **constrained("!hang"))
        run.add("plain", [1], 20)
        run.add("good", [1], 8, **constrained("xy"))
        self.steps_until(
            run, lambda: bool(run.answers["plain", 0].finish_reason and run.answers["good", 0].finish_reason)
        )
        assert text_of(run, "late") == ""
        hanging.set()
        run.run()
        assert text_of(run, "late") == "!hang"
        assert text_of(run, "good") == "xy"
        assert run.answers["late", 0].finish_reason == "stop"
        run.check_answers()

    @pytest.mark.usefixtures("hanging")
    def test_nobody_waits_behind_one_that_was_behind_another(self) -> None:
        run = harness()
        for name in ("late", "later", "latest"):
            run.add(name, [1], 8, **constrained("!hang"))
        run.add("good", [1], 8, **constrained("xy"))
        self.steps_until(run, lambda: run.answers["good", 0].finish_reason is not None)
        assert text_of(run, "good") == "xy"

    @pytest.mark.usefixtures("hanging")
    def test_one_that_does_not_come_ends_its_request_alone(self) -> None:
        service = ManualService()
        run = harness(service)
        run.scheduler.grammars.masks.limit_s = 0.01
        run.add("late", [1], 8, **constrained("!hang"))
        run.add("good", [1], 8, **constrained("xy"))
        run.run()
        assert re.search(r"were not found in 0\.[1-9] s, the limit is 0\.01 s", str(run.answers["late", 0].error))
        assert run.answers["late", 0].error_param == "structured_outputs"
        assert text_of(run, "good") == "xy"
        assert service.backends.breaker.num_faults == 0
        run.add("next", [1], 8, **constrained("xyz"))
        run.run()
        assert text_of(run, "next") == "xyz"
        run.core.close()
        assert any_at_work()  # the interpreter cannot be taken down meanwhile

    def test_an_engine_whose_masks_hang_again_and_again_is_left_alone_until_they_end(
        self, hanging: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each leaves a thread behind, which nothing can end: there were as many as clients sent such grammars."""
        monkeypatch.setattr("llmkit.scheduling.grammar_gate.MAX_LOST", 2)
        run = harness()
        masks = run.scheduler.grammars.masks
        masks.limit_s = 0.01
        for name in ("first", "second"):
            run.add(name, [1], 8, **constrained("!hang"))
            run.run()
            assert run.answers[name, 0].finish_reason == "error"
        assert masks.num_lost("hostile") == 2
        run.add("third", [1], 8, **constrained("xy"))
        run.add("plain", [1], 3)
        run.run()
        assert "still at work in 2 threads" in str(run.answers["third", 0].error)
        assert run.answers["plain", 0].finish_reason == "length"
        hanging.set()
        for _, thread in masks._lost:
            thread.join()
        run.add("fourth", [1], 8, **constrained("xy"))
        run.run()
        assert text_of(run, "fourth") == "xy"

    def test_a_request_that_is_aborted_meanwhile_is_gone(self, hanging: threading.Event) -> None:
        run = harness()
        run.add("late", [1], 8, **constrained("!hang"))
        self.steps_until(run, lambda: run.scheduler.grammars.masks.num_late == 1)
        run.core.abort(["late"])
        run.check_drained()
        hanging.set()
        run.add("next", [1], 8, **constrained("xyz"))
        run.run()
        assert text_of(run, "next") == "xyz"
        assert text_of(run, "late") == ""

    def test_a_request_that_is_preempted_meanwhile_keeps_its_token(self, hanging: threading.Event) -> None:
        run = harness()
        choices = ("!hang", "!hangar", "oak")
        run.add("late", [1, 2, 3], 12, **constrained(*choices))
        self.steps_until(run, lambda: run.scheduler.grammars.masks.num_late == 1)
        run.scheduler.vacate()
        run.add("plain", [1], 6)
        for _ in range(3):
            run.core.step()
            run.scheduler.check_integrity()
        hanging.set()
        run.run()
        assert run.answers["late", 0].token_ids == alone([1, 2, 3], sequence_seed(0, 0), choices)
        run.check_answers()

    def test_masks_that_are_slow_again_and_again_end_their_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hostile_grammars, "BUSY_S", 0.02)
        monkeypatch.setattr("llmkit.scheduling.sequence_grammar.ALLOWANCE", 2)
        monkeypatch.setattr("llmkit.scheduling.mask_threads.CLOCK_RATIO", 1e6)  # however busy the machine is
        run = harness()
        run.scheduler.grammars.masks.limit_s = 0.03
        run.add("a", [1], 8, **constrained("!busy"))
        run.add("good", [1], 8, **constrained("xy"))
        run.run()
        assert "finding the tokens allowed took 0.1 s in all, more than 2 times" in str(run.answers["a", 0].error)
        assert len(run.answers["a", 0].token_ids) >= 3
        assert text_of(run, "good") == "xy"

    def test_no_step_waits_for_a_grammar_that_was_slow_the_last_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("llmkit.scheduling.sequence_grammar.SLOW_S", -1.0)
        run = harness()
        run.add("first", [1], 8, **constrained("xyzzy"))
        self.steps_until(run, lambda: len(run.answers["first", 0].token_ids) == 2)
        run.scheduler.grammars.masks.wait_s = 1e6
        run.run()
        assert text_of(run, "first") == "xyzzy"
