from __future__ import annotations

import pytest

from llmkit.errors import ConfigError, InvalidRequestError
from llmkit.requests.message import PriorOutput
from llmkit.requests.request import sequence_seed
from llmkit.testing.fake_executor import fake_answer
from llmkit.testing.scheduling import SchedulingHarness
from llmkit_schedulers.fcfs import FcfsPolicy


def harness(**settings):
    return SchedulingHarness(FcfsPolicy(), **settings)


def recorded(**settings):
    """A harness, and the list of plans it executes."""
    plans = []
    return harness(before_step=plans.append, **settings), plans


class TestPlans:
    def test_a_prompt_is_spread_over_steps_within_the_budget(self):
        run, plans = recorded(max_num_batched_tokens=5)
        run.add("a", list(range(12)), 2)
        run.run()
        assert [plan.num_new.tolist() for plan in plans] == [[5], [5], [2], [1]]
        assert [plan.samples.tolist() for plan in plans] == [[False], [False], [True], [True]]
        assert [plan.num_computed.tolist() for plan in plans] == [[0], [5], [10], [12]]
        run.check_answers()

    @pytest.mark.parametrize("shared", [160, 40])
    def test_a_long_shared_prefix_is_computed_once(self, shared):
        run, plans = recorded(block_size=16, num_blocks=100, max_model_len=1000, max_num_batched_tokens=1000)
        for i in range(3):
            run.add(f"r{i}", [*range(shared), *([300 + i] * 20)], 2)
        run.run()
        length = shared + 20
        if shared == 160:
            assert [plan.num_new.tolist() for plan in plans] == [[length], [1, 20, 20], [1, 1]]
        else:  # not worth waiting for
            assert plans[0].num_new.tolist() == [length] * 3
        run.check_answers()

    def test_others_with_another_salt_do_not_wait_for_a_prefix(self):
        run, plans = recorded(block_size=16, num_blocks=100, max_model_len=1000, max_num_batched_tokens=1000)
        for salt in ("a", "b"):
            run.add(salt, list(range(200)), 2, cache_salt=salt)
        run.run()
        assert plans[0].num_new.tolist() == [200, 200]

    def test_running_requests_come_before_waiting_ones(self):
        run, plans = recorded(max_num_batched_tokens=6)
        run.add("a", [1] * 4, 5)
        run.step()
        run.add("b", [2] * 9, 2)
        run.run()
        assert [plan.num_new.tolist() for plan in plans] == [[4], [1, 5], [1, 4], [1, 1], [1]]

    def test_the_sequence_limit_holds(self):
        run, plans = recorded(max_num_seqs=2)
        for i in range(5):
            run.add(f"r{i}", [i], 3)
        run.run()
        assert max(plan.num_rows for plan in plans) == 2
        run.check_answers()

    def test_freed_slots_are_used_again_at_once(self):
        run, plans = recorded(max_num_seqs=1)
        run.add("a", [1], 1)
        run.add("b", [2], 1)
        run.run()
        assert [plan.removed_slots for plan in plans] == [[], [0]]
        assert [added.request.request_id for plan in plans for added in plan.added] == ["a", "b"]

    def test_an_unchanged_batch_is_described_by_arrays_alone(self):
        run, plans = recorded(block_size=16)
        for i in range(3):
            run.add(f"r{i}", [i], 6)
        run.run()
        for plan in plans[1:]:
            changes = [plan.added, plan.block_updates, plan.removed_slots, plan.block_copies]
            assert changes == [[], [], [], []]

    def test_prefill_and_decode_apart(self):
        class Apart(FcfsPolicy):
            mixes_prefill_and_decode = False

        plans = []
        run = SchedulingHarness(Apart(), max_num_batched_tokens=6, before_step=plans.append)
        run.add("a", [1] * 4, 5)
        run.step()
        run.add("b", [2] * 9, 4)
        run.run()
        assert [plan.num_new.tolist() for plan in plans[:5]] == [[4], [6], [3], [1, 1], [1, 1]]
        run.check_answers()

    def test_without_chunks_a_prompt_waits_for_a_whole_budget(self):
        run, plans = recorded(max_num_batched_tokens=16, max_model_len=16, enable_chunked_prefill=False)
        run.add("a", [1] * 10, 3)
        run.add("b", [2] * 10, 3)
        run.run()
        assert [plan.num_new.tolist() for plan in plans[:2]] == [[10], [1, 10]]

    def test_limits_must_be_resolved(self):
        from llmkit.config.engine_config import EngineConfig
        from llmkit.config.sections import ModelConfig
        from llmkit.scheduling.scheduler import Scheduler

        config = EngineConfig(model=ModelConfig(max_model_len=16))
        with pytest.raises(ConfigError, match="max_num_batched_tokens"):
            Scheduler(config, harness().scheduler.manager.layout, FcfsPolicy())


class TestStopping:
    def answer(self, **fields):
        run = harness()
        run.add("a", [3, 1], 20, seed=4, **fields)
        run.run()
        run.check_answers()
        return run.answers["a", 0]

    def test_length(self):
        answer = self.answer()
        assert (len(answer.token_ids), answer.finish_reason, answer.stop_reason) == (20, "length", None)

    def test_stop_token(self):
        token = fake_answer([3, 1], 4, 20)[5]
        answer = self.answer(stop_token_ids=(token,))
        assert (answer.finish_reason, answer.stop_reason) == ("stop", token)
        assert answer.token_ids[-1] == token

    def test_end_of_sequence_gives_no_reason(self):
        token = fake_answer([3, 1], 4, 20)[5]
        answer = self.answer(stop_token_ids=(token,), eos_token_ids=frozenset({token}))
        assert (answer.finish_reason, answer.stop_reason) == ("stop", None)

    def test_min_tokens_comes_first(self):
        tokens = fake_answer([3, 1], 4, 20)
        answer = self.answer(stop_token_ids=tuple(tokens), min_tokens=7)
        assert answer.token_ids == tokens[:7]

    def test_stop_token_at_full_length_is_a_stop(self):
        token = fake_answer([3, 1], 4, 20)[19]
        assert self.answer(stop_token_ids=(token,)).finish_reason == "stop"

    def test_context_end_is_a_length(self):
        run = harness(max_model_len=16)
        run.add("a", [1] * 10, 100)
        run.run()
        assert (len(run.answers["a", 0].token_ids), run.answers["a", 0].finish_reason) == (6, "length")


class TestDoor:
    @pytest.mark.parametrize(
        ("prompt", "max_tokens", "match"),
        [
            ([], 1, "no tokens"),
            ([1] * 17, 1, "17 tokens, but max_model_len is 16"),
            ([1] * 16, 1, "leaves no room"),
            ([1] * 13, 1, "KV cache holds at most 12"),
        ],
    )
    def test_refused(self, prompt, max_tokens, match):
        run = harness(max_model_len=16, num_blocks=3)
        with pytest.raises(InvalidRequestError, match=match) as caught:
            run.add("a", prompt, max_tokens)
        assert caught.value.param == "prompt"
        assert not run.core.has_work()

    @pytest.mark.parametrize(
        "prior", [(PriorOutput((1,)),), (PriorOutput((1,)),) * 3, (PriorOutput((1,), "stop"), PriorOutput((), "abort"))]
    )
    def test_earlier_outputs_that_do_not_fit(self, prior):
        run = harness()
        with pytest.raises(InvalidRequestError) as caught:
            run.add("a", [1], n=2, prior_outputs=prior)
        assert caught.value.param == "n"
        assert not run.core.has_work()


class TestWindows:
    @pytest.mark.parametrize("depth", [1, 2])
    def test_a_chunk_shrinks_when_nothing_else_could_make_room(self, depth):
        # A whole prompt at once would need 10 blocks in each group; in small chunks the window needs fewer.
        run = harness(windows=(None, 4), num_blocks=15, max_model_len=48, max_concurrent_steps=depth)
        run.add("a", [i % 3 for i in range(40)], 4)
        run.run()
        run.check_answers()
        assert run.answers["a", 0].finish_reason == "length"
        assert len(run.answers["a", 0].token_ids) == 4


class TestPreemption:
    def test_the_youngest_yields_and_everybody_gets_the_right_answer(self):
        run = harness(num_blocks=8)
        for i in range(3):
            run.add(f"r{i}", [i] * 6, 14)
        run.run()
        run.check_answers()
        by_id = {request.request_id: request.metrics.num_preemptions for request in run.finished}
        assert by_id["r0"] == 0
        assert by_id["r2"] > 0
        assert run.finished[0].request_id == "r0"

    def test_own_blocks_found_again_are_no_prefix_hits(self):  # B66
        run = harness(num_blocks=8)
        for i in range(3):
            run.add(f"r{i}", [i] * 6, 14)
        run.run()
        assert run.core.stats().num_preemptions > 0
        assert run.core.stats().prefix_hit_tokens == 0
        assert {answer.num_cached_tokens for answer in run.answers.values()} == {0}
        run.add("again", [2] * 6 + [9, 9], 1)
        run.run()
        assert run.answers["again", 0].num_cached_tokens == 4
        assert run.core.stats().prefix_hit_tokens == 4

    @pytest.mark.parametrize("depth", [1, 2])
    @pytest.mark.parametrize("whom", ["needing", "oldest", "other"])
    def test_requests_that_throw_each_other_out_come_to_an_end(self, whom, depth):
        class Quarrel(FcfsPolicy):
            def victim(self, running, needing):
                others = [view for view in running if view is not needing]
                return {"needing": needing, "oldest": running[0], "other": others[0]}[whom]

            def chunk(self, request, offered):  # noqa: ARG002
                return min(2, offered)

        run = SchedulingHarness(
            Quarrel(), num_blocks=11, max_num_batched_tokens=8, max_concurrent_steps=depth, enable_prefix_caching=False
        )
        for i in range(3):
            run.add(f"r{i}", [i] * 36, 6)
        run.run(max_steps=2000)
        run.check_answers()


class TestSeveralSequences:
    @pytest.mark.parametrize("caching", [True, False])
    def test_the_prompt_is_computed_once(self, caching):
        run, plans = recorded(enable_prefix_caching=caching, max_num_seqs=8)
        run.add("a", list(range(21)), 3, n=4, seed=7)
        run.run()
        run.check_answers()
        assert len({tuple(answer.token_ids) for answer in run.answers.values()}) == 4
        # 21 prompt tokens once, the last one again for each fork, and two tokens more for each sequence.
        assert run.executor.num_tokens_computed == 21 + 3 + 4 * 2
        assert sum(len(plan.block_copies) for plan in plans) == 0  # the prompt ends at a block border
        assert run.finished[0].finish_reasons == ("length",) * 4

    def test_a_begun_block_is_copied(self):
        run, plans = recorded()
        run.add("a", list(range(11)), 5, n=3)
        run.run()
        run.check_answers()
        assert sum(len(plan.block_copies) for plan in plans) == 2

    @pytest.mark.parametrize("caching", [True, False])
    def test_the_leader_may_end_before_anyone_is_forked(self, caching):
        run = harness(max_num_seqs=1, enable_prefix_caching=caching)
        run.add("a", list(range(10)), 1, n=3)
        run.run()
        run.check_answers()
        assert run.executor.num_tokens_computed == 10 + 2

    def test_a_kept_prompt_gives_way_before_anybody_is_preempted(self):
        run = harness(max_num_seqs=2, num_blocks=8, enable_prefix_caching=False)
        run.add("old", [5], 26)
        run.step()
        run.add("a", list(range(12)), 1, n=2)
        run.step()
        assert run.answers["a", 0].finish_reason == "length"
        run.run()
        run.check_answers()
        assert run.core.stats().num_preemptions == 0

    def test_siblings_of_a_failed_leader_go_on(self):
        failed = []

        def fail_leader(plan):
            if not failed:
                failed.append(plan.step)
                return {0: "NaN logits"}
            return {}

        run = harness(failing_rows=fail_leader)
        run.add("a", list(range(10)), 4, n=3)
        run.run()
        run.check_answers()
        assert [run.answers["a", i].finish_reason for i in range(3)] == ["error", "length", "length"]
        assert run.answers["a", 0].error == "NaN logits"
        assert run.executor.num_tokens_computed == 10 + 10 + 1 + 3 + 3
        assert run.finished[0].errors == ("NaN logits",)

    def test_siblings_of_an_aborted_leader_go_on(self):
        run = harness(max_num_batched_tokens=4)
        run.add("a", list(range(10)), 4, n=3)
        run.step()
        run.core.abort_sequence("a", 0)
        run.run()
        run.check_answers()
        assert run.finished[0].finish_reasons == ("abort", "length", "length")

    @pytest.mark.parametrize("steps", range(6))
    def test_abort_ends_all_of_them(self, steps):
        run = harness(max_num_batched_tokens=4, max_num_seqs=2)
        run.add("a", list(range(10)), 4, n=4)
        for _ in range(steps):
            run.step()
        run.core.abort(["a"])
        assert not run.core.has_work()
        run.check_drained()
        assert run.finished[0].finish_reasons == ("abort",) * 4

    def test_seeds_differ_and_are_the_same_in_every_run(self):  # B16
        answers = []
        for _ in range(2):
            run = harness()
            run.add("a", [4, 5, 6], 24, n=4, seed=7, temperature=1.5)
            run.run()
            answers.append([run.answers["a", i].token_ids for i in range(4)])
        assert answers[0] == answers[1]
        assert len({tuple(tokens) for tokens in answers[0]}) == 4
        assert answers[0] == [fake_answer([4, 5, 6], sequence_seed(7, i), 24) for i in range(4)]


class TestScoring:
    def test_a_scored_prompt_samples_nothing(self):
        run, plans = recorded(max_num_batched_tokens=4)
        run.add("a", [5, 6, 7, 8, 9, 10], 0, prompt_logprobs=0)
        run.run()
        answer = run.answers["a", 0]
        assert (answer.token_ids, answer.finish_reason) == ([], "length")
        assert [entry and entry.token_ids for entry in answer.prompt_logprobs] == [None, [6], [7], [8], [9], [10]]
        assert not any(plan.samples.any() for plan in plans)

    def test_full_context(self):
        run = harness(max_model_len=16)
        run.add("a", [1] * 16, 0, prompt_logprobs=0)
        run.run()
        assert len(run.answers["a", 0].prompt_logprobs) == 16

    def test_all_sequences_end_together(self):
        run = harness()
        run.add("a", [5, 6, 7], 0, prompt_logprobs=0, n=3)
        run.run()
        assert {run.answers["a", i].finish_reason for i in range(3)} == {"length"}
        assert run.executor.num_tokens_computed == 3

    def test_cached_prompts_are_computed_all_the_same(self):
        run = harness()
        run.add("a", [1] * 12, 1)
        run.run()
        run.add("b", [1] * 12, 1, prompt_logprobs=0)
        run.run()
        assert len(run.answers["b", 0].prompt_logprobs) == 12
        assert run.answers["b", 0].num_cached_tokens == 0

    def test_entries_are_told_once_whatever_is_preempted(self):
        run = harness(num_blocks=8, max_num_batched_tokens=5)
        for i in range(3):
            run.add(f"r{i}", [i] * 6, 14, prompt_logprobs=0)
        run.run()
        assert run.core.stats().num_preemptions > 0
        assert {len(answer.prompt_logprobs) for answer in run.answers.values()} == {6}


class TestResumption:
    def test_goes_on_where_it_was(self):
        whole = fake_answer([1, 2], 3, 10)
        run = harness()
        run.add("a", [1, 2], 10, seed=3, prior_outputs=(PriorOutput(tuple(whole[:4])),))
        run.run()
        assert run.answers["a", 0].token_ids == whole[4:]

    @pytest.mark.parametrize("depth", [1, 2])
    def test_every_sequence_goes_on_where_it_was(self, depth):
        seeds = [sequence_seed(3, index) for index in range(4)]
        whole = [fake_answer([1, 2, 3, 4, 5], seed, 10) for seed in seeds]
        prior = (
            PriorOutput(tuple(whole[0][:3]), "stop"),
            PriorOutput(tuple(whole[1][:4])),
            PriorOutput(),
            PriorOutput(tuple(whole[3][:9])),
        )
        run = harness(max_concurrent_steps=depth)
        run.add("a", [1, 2, 3, 4, 5], 10, n=4, seed=3, prior_outputs=prior)
        run.run()
        told = [run.answers["a", index].token_ids for index in range(4)]
        assert told == [[], whole[1][4:], whole[2], whole[3][9:]]
        assert run.finished[0].finish_reasons == ("stop", "length", "length", "length")
        assert run.finished[0].num_output_tokens == 3 + 10 + 10 + 10

    def test_some_sequences_have_nothing_left_to_do(self):
        whole = [fake_answer([1, 2], sequence_seed(0, index), 4) for index in range(3)]
        run = harness()
        prior = (PriorOutput(tuple(whole[0])), PriorOutput(tuple(whole[1][:2])), PriorOutput(tuple(whole[2])))
        run.add("a", [1, 2], 4, n=3, prior_outputs=prior)
        run.run()
        assert [run.answers["a", index].token_ids for index in range(3)] == [[], whole[1][2:], []]
        assert {answer.finish_reason for answer in run.answers.values()} == {"length"}

    def test_prompt_logprobs_are_not_told_twice(self):
        run = harness(max_num_batched_tokens=4)
        run.add("a", [1, 2, 3, 4, 5, 6, 7], 2, prompt_logprobs=0, num_prior_prompt_logprobs=4)
        run.run()
        assert [entry.token_ids for entry in run.answers["a", 0].prompt_logprobs] == [[5], [6], [7]]

    def test_nothing_left_to_do(self):
        run = harness()
        run.add("a", [1, 2], 4, prior_outputs=(PriorOutput((1, 2, 3, 4)),))
        assert run.core.has_work()
        run.run()
        assert (run.answers["a", 0].token_ids, run.answers["a", 0].finish_reason) == ([], "length")


class TestAhead:
    """Plans made before the results of earlier ones are known."""

    def test_answers_are_the_same_and_steps_overlap(self):
        run = harness(max_concurrent_steps=2)
        for i in range(3):
            run.add(f"r{i}", [i] * 5, 6)
        outputs = [len(run.step()) for _ in range(6)]
        assert outputs == [3] * 6
        run.run()
        run.check_answers()

    def test_no_step_is_planned_beyond_the_length(self):
        run, plans = recorded(max_concurrent_steps=3)
        run.add("a", [1], 4)
        run.run()
        assert len(plans) == 4

    def test_a_stop_in_flight_drops_the_step_after_it(self):
        run, plans = recorded(max_concurrent_steps=2)
        tokens = fake_answer([1], 0, 8)
        run.add("a", [1], 8, stop_token_ids=(tokens[2],))
        run.run()
        assert run.answers["a", 0].token_ids == tokens[: tokens.index(tokens[2]) + 1]
        assert len(plans) == len(run.answers["a", 0].token_ids) + 1

    def test_a_token_of_a_preempted_request_is_kept(self):
        run = harness(max_concurrent_steps=2, num_blocks=8)
        for i in range(3):
            run.add(f"r{i}", [i] * 6, 14)
        run.run()
        assert run.core.stats().num_preemptions > 0
        run.check_answers()

    @pytest.mark.parametrize("budget", [2, 3, 5])
    @pytest.mark.parametrize("num_blocks", range(5, 12))
    def test_nobody_enters_again_before_its_last_token_has_arrived(self, num_blocks, budget):
        run = harness(
            max_concurrent_steps=3, num_blocks=num_blocks, max_num_batched_tokens=budget, enable_prefix_caching=False
        )
        for i in range(3):
            run.add(f"r{i}", [i] * (3 + i), 14)
        run.run()
        run.check_answers()

    def test_abort_in_flight(self):
        run = harness(max_concurrent_steps=2)
        run.add("a", [1] * 5, 6)
        run.add("b", [2] * 5, 6)
        run.step()
        run.core.abort(["a"])
        run.add("a", [3] * 5, 6)
        run.finished.clear()
        run.run()
        run.check_answers()
