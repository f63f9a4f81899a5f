"""Cases from the field that concern scheduling, by their numbers."""

from __future__ import annotations

import pytest

from llmkit.errors import InvalidRequestError
from llmkit.testing.fake_executor import fake_answer
from llmkit.testing.scheduling import SchedulingHarness
from llmkit_schedulers.fcfs import FcfsPolicy
from llmkit_schedulers.priority import PriorityPolicy


class TestB36:
    """Blocks must not be found before they are filled, nor after their owner died half-way."""

    PREFIX = tuple((7 * i) % 50 for i in range(64))

    @pytest.mark.parametrize("depth", [1, 2])
    def test_abort_in_the_middle_of_a_shared_prefix(self, depth):
        run = SchedulingHarness(FcfsPolicy(), max_num_batched_tokens=24, max_concurrent_steps=depth, num_blocks=64)
        run.add("a", [*self.PREFIX, 1], 8)
        run.add("b", [*self.PREFIX, 2], 8)
        run.step()
        run.core.abort(["a"])
        while not run.answers["b", 0].token_ids:
            run.step()
        run.add("c", [*self.PREFIX, 3], 8)
        run.run()
        run.check_answers()
        assert run.answers["c", 0].num_cached_tokens == 64

    def test_preemption_in_the_middle_of_a_shared_prefix(self):
        class VictimA(FcfsPolicy):
            def victim(self, running, needing):  # noqa: ARG002
                return next((view for view in running if view.request_id == "a"), None)

        run = SchedulingHarness(VictimA(), max_num_batched_tokens=24, num_blocks=22)
        run.add("filler", [99], 24)
        run.add("a", [*self.PREFIX, 1], 8)
        run.add("b", [*self.PREFIX, 2], 8)
        run.run()
        run.add("c", [*self.PREFIX, 3], 8)
        run.run()
        run.check_answers()
        assert run.core.stats().num_preemptions > 0


class TestB38:
    """A request that the cache can never hold must not spin, nor hold up those behind it. 8 blocks × 16 tokens."""

    def run(self, depth=1):
        return SchedulingHarness(
            FcfsPolicy(), num_blocks=8, block_size=16, max_model_len=512, max_concurrent_steps=depth
        )

    def test_a_prompt_that_never_fits_is_refused(self):
        run = self.run()
        with pytest.raises(InvalidRequestError, match="200 tokens, but the KV cache holds at most 128") as caught:
            run.add("a", [1] * 200, 1)
        assert caught.value.param == "prompt"
        run.add("small", [2] * 5, 4)
        run.run()
        run.check_answers()

    @pytest.mark.parametrize("depth", [1, 2])
    def test_an_answer_that_grows_to_the_wall_ends_there(self, depth):
        run = self.run(depth)
        run.add("a", [1] * 100, 100)
        run.add("small", [2] * 5, 4)
        run.run(max_steps=200)
        assert (len(run.answers["a", 0].token_ids), run.answers["a", 0].finish_reason) == (28, "length")
        assert run.answers["small", 0].token_ids == fake_answer([2] * 5, 0, 4)

    @pytest.mark.parametrize("depth", [1, 2])
    def test_exactly_the_whole_cache_works(self, depth):
        run = self.run(depth)
        run.add("a", [1] * 100, 28)
        run.add("small", [2] * 5, 4)
        run.run(max_steps=200)
        run.check_answers()
        assert len(run.answers["a", 0].token_ids) == 28

    def test_a_prompt_of_the_whole_cache_gets_its_token(self):
        run = self.run()
        run.add("a", [1] * 128, 5)
        run.run()
        assert run.answers["a", 0].token_ids == fake_answer([1] * 128, 0, 1)


class TestB40:
    """A victim must be out of the step, whole."""

    @pytest.mark.parametrize("arrival", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
    @pytest.mark.parametrize("depth", [1, 2])
    def test_victims_that_are_already_planned(self, arrival, depth):
        plans = []
        run = SchedulingHarness(PriorityPolicy(), num_blocks=6, max_concurrent_steps=depth, before_step=plans.append)
        for priority in arrival:
            run.add(f"p{priority}", [priority] * 5, 12, priority=priority)
            run.step()
        run.run()
        run.check_answers()
        stats = run.core.stats()
        assert stats.num_preemptions > 0
        preemptions = {request.request_id: request.metrics.num_preemptions for request in run.finished}
        assert preemptions["p0"] == 0
        for plan in plans:
            # A preempted slot may be given to another, never be kept by a row of the same sequence.
            added = {row.slot for row in plan.added}
            assert not (set(plan.removed_slots) - added) & set(plan.slots.tolist())

    def test_the_budget_of_a_withdrawn_row_goes_to_others(self):
        plans = []
        run = SchedulingHarness(PriorityPolicy(), num_blocks=5, max_num_batched_tokens=2, before_step=plans.append)
        run.add("worst", [1] * 3, 12, priority=9)
        run.step()
        run.step()
        run.add("best", [2] * 3, 12, priority=0)
        run.run()
        run.check_answers()
        assert run.core.stats().num_preemptions > 0
        assert [request.request_id for request in run.finished] == ["best", "worst"]


class TestB42:
    """Ids in use, and ids used again at once."""

    def test_a_duplicate_id_is_refused_and_the_first_goes_on(self):
        run = SchedulingHarness(FcfsPolicy())
        run.add("x", [1, 2], 6)
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="already being served") as caught:
                run.core.add(run.requests["x"])
            assert caught.value.param == "request_id"
            run.step()
        run.run()
        run.check_answers()

    @pytest.mark.parametrize("depth", [1, 2])
    def test_abort_and_add_again_200_times(self, depth):
        run = SchedulingHarness(FcfsPolicy(), max_concurrent_steps=depth)
        for i in range(200):
            run.add("x", [i % 7, 2], 6)
            run.step()
            if i < 199:
                run.core.abort(["x"])
        run.finished.clear()
        run.run()
        run.check_answers()
        assert run.core.stats().num_unfinished == 0

    def test_strange_ids(self):
        run = SchedulingHarness(FcfsPolicy())
        for name in ("x" * 10_000, "a\nb", "", "a/0", "a"):
            run.add(name, [1], 3, n=2)
        run.run()
        run.check_answers()
