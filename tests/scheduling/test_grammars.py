"""Requests with a grammar, in the scheduler: waiting, masks, ends, faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llmkit.grammars.cache import GrammarFailure
from llmkit.requests.message import PriorOutput
from llmkit.scheduling.plan import StepPlan
from llmkit.testing.constrained import EOS, PAIRS, ManualService, alone, constrained, text_of
from llmkit.testing.scheduling import SchedulingHarness
from llmkit_schedulers.fcfs import FcfsPolicy


class Swapping(FcfsPolicy):
    preemption = "swap"


def harness(service: ManualService | None = None, **settings: Any) -> SchedulingHarness:
    return SchedulingHarness(FcfsPolicy(), grammars=service or ManualService(), **settings)  # type: ignore[arg-type]


ENDINGS = ("eat", "eaten", "oak", "ouija", "I see a sea of ouioui")


class TestAnswers:
    @pytest.mark.parametrize("settings", [{}, {"max_concurrent_steps": 2}, {"max_num_batched_tokens": 3}])
    @pytest.mark.parametrize("seed", range(6))
    def test_the_answer_is_one_of_the_choices(self, settings: dict[str, int], seed: int) -> None:
        run = harness(**settings)
        run.add("a", [1, 2, 3, 4, 5], 40, seed=seed, **constrained(*ENDINGS))
        run.add("plain", [9, 8], 12)
        run.run()
        answer = run.answers["a", 0]
        assert answer.token_ids == alone([1, 2, 3, 4, 5], seed, ENDINGS)
        assert text_of(run, "a") in ENDINGS
        assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
        run.check_answers()

    def test_forks_have_a_state_each(self) -> None:
        run = harness(max_num_seqs=3)
        run.add("a", [7, 7, 7], 40, n=5, **constrained(*ENDINGS))
        run.run()
        texts = [text_of(run, "a", i) for i in range(5)]
        assert set(texts) <= set(ENDINGS)
        assert len(set(texts)) > 1

    @pytest.mark.parametrize("depth", [1, 2])
    @pytest.mark.parametrize("policy", [FcfsPolicy, Swapping])
    def test_preemption_changes_nothing(self, policy: type[FcfsPolicy], depth: int) -> None:
        long = tuple(f"{vowel} was seen by {vowel}{vowel}{vowel} and nobody else" for vowel in PAIRS)
        run = SchedulingHarness(
            policy(), grammars=ManualService(), num_blocks=14, num_host_blocks=40, max_concurrent_steps=depth
        )  # type: ignore[arg-type]
        for i in range(4):
            run.add(f"r{i}", [i] * 6, 60, seed=i, **constrained(*long))
        run.run()
        assert run.core.stats().num_preemptions > 0
        assert (run.core.stats().num_swaps > 0) is (policy is Swapping)
        for i in range(4):
            assert run.answers[f"r{i}", 0].token_ids == alone([i] * 6, i, long)

    def test_an_answer_goes_on_after_another_engine(self) -> None:
        tokens = alone([4, 2], 3, ENDINGS)
        run = harness()
        run.add("a", [4, 2], 40, seed=3, prior_outputs=(PriorOutput(tuple(tokens[:2])),), **constrained(*ENDINGS))
        run.run()
        assert run.answers["a", 0].token_ids == tokens[2:]
        # All of it has come already: then there is nothing to do but to say so.
        text = tuple(32 * [0])[:0] + tuple(ord(c) - 32 for c in "oak")
        run.add("b", [4, 2], 40, prior_outputs=(PriorOutput(text),), **constrained(*ENDINGS))
        run.run()
        assert (run.answers["b", 0].token_ids, run.answers["b", 0].finish_reason) == ([], "stop")

    def test_what_an_earlier_engine_has_said_must_fit(self) -> None:
        run = harness()
        run.add("a", [4], 40, prior_outputs=(PriorOutput((ord("x") - 32,)),), **constrained(*ENDINGS))
        run.run()
        assert run.answers["a", 0].finish_reason == "error"

    def test_the_length_limit_cuts(self) -> None:
        run = harness()
        run.add("cut", [1], 3, **constrained("xyzzy"))
        run.add("fits", [1], 5, **constrained("xyzzy"))
        run.run()
        assert (text_of(run, "cut"), run.answers["cut", 0].finish_reason) == ("xyz", "length")
        assert (text_of(run, "fits"), run.answers["fits", 0].finish_reason) == ("xyzzy", "stop")

    def test_the_empty_text_needs_no_step(self) -> None:
        run = harness()
        run.add("a", [1], 5, n=2, **constrained(""))
        run.run()
        assert [run.answers["a", i].finish_reason for i in range(2)] == ["stop", "stop"]
        assert run.answers["a", 0].token_ids == []

    def test_one_that_the_vocabulary_cannot_write_fails(self) -> None:
        run = harness()
        run.add("a", [1], 5, **constrained("é"))
        run.run()
        assert run.answers["a", 0].finish_reason == "error"
        assert "no text that this model can write" in str(run.answers["a", 0].error)

    def test_a_dead_end_fails(self) -> None:
        run = harness()
        run.add("a", [1], 5, **constrained("xé"))
        run.run()
        assert "no token of this model leads on" in str(run.answers["a", 0].error)
        assert run.answers["a", 0].error_param == "structured_outputs"


class TestStopTokens:
    """What a grammar allows and what ends an answer are different things."""

    def masks(self, choices: tuple[str, ...], **fields: Any) -> list[set[int]]:
        plans: list[StepPlan] = []
        run = harness(before_step=plans.append)
        run.add("a", [1], 20, **constrained(*choices, **fields))
        run.run()
        found = []
        for plan in plans:
            assert plan.grammar_masks is not None
            found.append(set(np.flatnonzero(np.unpackbits(plan.grammar_masks[0].view(np.uint8), bitorder="little"))))
        return found

    def test_the_end_is_allowed_where_the_text_may_end_and_nowhere_else(self) -> None:
        first, second, *_ = self.masks(("x", "xy"))
        assert first == {ord("x") - 32}
        assert second == {ord("y") - 32, EOS}

    def test_a_stop_token_that_is_text_is_no_text(self) -> None:
        stops = frozenset({EOS, ord("y") - 32})
        masks = self.masks(("xx", "xy", "xxz"), stop_token_ids=stops)
        assert masks[1] == {ord("x") - 32}
        assert masks[2] == {ord("z") - 32, EOS}  # where the model has end tokens of its own, only they

    def test_without_end_tokens_the_stop_tokens_end_it(self) -> None:
        masks = self.masks(("x", "xy"), stop_token_ids=frozenset({5}), eos_token_ids=frozenset())
        assert masks[1] == {ord("y") - 32, 5}

    def test_ignoring_the_end_the_text_goes_on_as_long_as_it_can(self) -> None:
        masks = self.masks(("x", "xy"), stop_token_ids=frozenset(), eos_token_ids=frozenset())
        assert [len(mask) for mask in masks] == [1, 1]

    def test_a_complete_text_ends_whatever_min_tokens_says(self) -> None:
        run = harness()
        run.add("a", [1], 20, min_tokens=9, **constrained("xy"))
        run.run()
        assert (text_of(run, "a"), run.answers["a", 0].finish_reason) == ("xy", "stop")


class TestWaiting:
    def test_others_run_meanwhile(self) -> None:
        service = ManualService(at_once=False)
        run = harness(service)
        run.add("waits", [1], 8, n=2, **constrained("xy"))
        run.add("runs", [2], 4)
        for _ in range(6):
            run.step()
        assert run.answers["runs", 0].finish_reason == "length"
        assert run.core.stats().num_compiling == 1
        assert run.core.has_work()
        service.finish(service.tickets[0])
        run.run()
        assert [text_of(run, "waits", i) for i in range(2)] == ["xy", "xy"]
        assert run.core.stats().num_compiling == 0

    @pytest.mark.parametrize(
        ("refused", "overloaded", "param"),
        [(True, False, "structured_outputs"), (False, False, None), (False, True, None)],
    )
    def test_a_failure_ends_all_sequences(self, refused: bool, overloaded: bool, param: str | None) -> None:
        service = ManualService(at_once=False)
        run = harness(service)
        run.add("a", [1], 8, n=3, **constrained("xy"))
        run.step()
        service.finish(service.tickets[0], GrammarFailure("too complex", refused, overloaded))
        outputs = run.step()
        assert {(o.index, o.finish_reason, o.error, o.error_param, o.overloaded) for o in outputs} == {
            (i, "error", "too complex", param, overloaded) for i in range(3)
        }
        assert not run.core.has_work()

    def test_an_abort_lets_go_of_the_grammar(self) -> None:
        service = ManualService(at_once=False)
        run = harness(service)
        run.add("a", [1], 8, n=2, **constrained("xy"))
        run.step()
        run.core.abort(["a"])
        assert service.cancelled == service.tickets
        assert not run.core.has_work()
        run.scheduler.check_integrity()
        # It is ready after all: nobody is there.
        service.finish(service.tickets[0])
        run.step()
        # The same id again.
        run.finished.clear()
        run.add("a", [1], 8, **constrained("xy"))
        service.finish(service.tickets[1])
        run.run()
        assert text_of(run, "a") == "xy"

    @pytest.mark.parametrize("index", [0, 2])
    def test_one_sequence_may_go_while_the_grammar_is_compiled(self, index: int) -> None:
        service = ManualService(at_once=False)
        run = harness(service)
        run.add("a", [1], 8, n=3, **constrained("xy"))
        run.step()
        run.core.abort_sequence("a", index)
        run.scheduler.check_integrity()
        assert not service.cancelled
        service.finish(service.tickets[0])
        run.run()
        assert sum(run.answers["a", i].finish_reason == "stop" for i in range(3)) == 2

    def test_an_interrupt_ends_those_that_wait(self) -> None:
        service = ManualService(at_once=False)

        def interrupt(_: StepPlan) -> None:
            raise KeyboardInterrupt

        run = harness(service, before_step=interrupt)
        run.add("a", [1], 8, **constrained("xy"))
        run.add("b", [1], 8)
        with pytest.raises(KeyboardInterrupt):
            run.core.step()
        ends = {output.request_id: output.finish_reason for output in run.core.step()}
        assert ends == {"a": "error", "b": "error"}
        assert service.cancelled == service.tickets
        run.scheduler.check_integrity()


class TestFaults:
    @pytest.mark.parametrize(
        ("act", "message"),
        [
            ("!mask", "The grammar engine hostile failed: RuntimeError: no mask today"),
            ("!panic", "The grammar engine hostile failed: Panic: index out of bounds"),
            ("!accept", "The grammar engine hostile failed: RuntimeError: not accepted today"),
            ("!deny", "The grammar engine hostile does not accept a token that it had allowed."),
            ("!start", "The grammar engine hostile failed: RuntimeError: no start today"),
        ],
    )
    def test_a_grammar_at_fault_ends_its_request_alone(self, act: str, message: str) -> None:
        service = ManualService()
        run = harness(service)
        run.add("bad", [1], 8, **constrained(act))
        run.add("good", [1], 8, **constrained("xy"))
        run.add("plain", [1], 8)
        run.run()
        assert run.answers["bad", 0].error == message or act in ("!accept", "!deny")
        assert run.answers["bad", 0].finish_reason == "error"
        assert run.answers["bad", 0].error_param is None
        assert text_of(run, "good") == "xy"
        run.check_answers()
        assert service.backends.breaker.num_faults == 1

    def test_a_grammar_beyond_a_limit_of_its_library_is_no_fault_of_the_engine(self) -> None:
        service = ManualService()
        run = harness(service)
        run.add("a", [1], 8, **constrained("!limit"))
        run.run()
        answer = run.answers["a", 0]
        assert (answer.error, answer.error_param) == ("a limit is exceeded", "structured_outputs")
        assert service.backends.breaker.num_faults == 0

    def test_a_mask_that_takes_too_long_ends_its_request(self) -> None:
        service = ManualService()
        run = harness(service)
        run.scheduler.grammars.masks.limit_s = 0.01
        run.add("a", [1], 8, **constrained("!busy"))
        run.run()
        assert "The grammar is too complex: the tokens allowed at one place" in str(run.answers["a", 0].error)
        assert run.answers["a", 0].error_param == "structured_outputs"
        assert service.backends.breaker.num_faults == 0

    def test_calls_are_counted_and_timed(self) -> None:
        service = ManualService()
        run = harness(service)
        run.add("a", [1], 8, **constrained("xyz"))
        run.run()
        assert service.backends.calls["accept"].calls == 3
        assert service.backends.calls["fill_bitmask"].calls == 3
        assert service.backends.calls["fill_bitmask"].seconds > 0

    def test_an_engine_without_grammars_says_so(self) -> None:
        run = SchedulingHarness(FcfsPolicy())
        with pytest.raises(Exception, match="built without grammars"):
            run.add("a", [1], 8, **constrained("xy"))


def test_many_requests_in_any_order() -> None:
    """Everything at once: few blocks, small budget, steps in flight, forks."""
    run = harness(num_blocks=30, max_num_batched_tokens=16, max_concurrent_steps=2, max_num_seqs=5)
    check: list[Callable[[], None]] = []
    for i in range(12):
        prompt = [i % 3] * (3 + i)
        if i % 3 == 2:
            run.add(f"r{i}", prompt, 20, seed=i)
            continue
        run.add(f"r{i}", prompt, 40, seed=i, n=1 + i % 2, **constrained(*ENDINGS))

        def same(i: int = i, prompt: list[int] = prompt) -> None:
            assert run.answers[f"r{i}", 0].token_ids == alone(prompt, i, ENDINGS)

        check.append(same)
    run.run()
    run.check_answers()
    for one in check:
        one()
