"""What the core does with a connector, case by case; the machine runs all of it at random."""

from __future__ import annotations

import pytest

from llmkit.errors import InvalidRequestError
from llmkit.execution.worker_transfers import ReportMerger, WorkerTransfers
from llmkit.hookspecs.connector import Retention, TransferPlan, TransferReport
from llmkit.scheduling.plan import InDoubt, StepTransfers
from llmkit.testing.memory_connector import MemoryConnector, MemoryScheduler, MemoryStore, MemoryWorker
from llmkit.testing.scheduling import SchedulingHarness
from llmkit_schedulers.fcfs import FcfsPolicy

PROMPT = list(range(30))


class Halves(MemoryConnector):
    """A connector in memory with halves of other classes."""

    def __init__(self, store, scheduler=MemoryScheduler, worker=MemoryWorker, **settings):
        super().__init__(store, **settings)
        self._kinds = scheduler, worker

    def scheduler_half(self, context):
        return self._kinds[0](self._store, context, self._asynchronous)

    def worker_half(self, context):
        return self._kinds[1](self._store, context, self._delay)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def harness(connector, **settings):
    return SchedulingHarness(FcfsPolicy(), **{"num_blocks": 40, "connector": connector} | settings)


def answered(run, name="a", prompt=PROMPT, **fields):
    run.add(name, prompt, **fields)
    run.run()
    run.check_answers()
    return run.answers[name, 0]


@pytest.fixture
def store():
    """A store that holds PROMPT."""
    made = MemoryStore()
    answered(harness(MemoryConnector(made)))
    return made


@pytest.mark.parametrize("asynchronous", [False, True])
class TestLoads:
    def test_only_the_rest_is_computed(self, store, asynchronous):
        run = harness(MemoryConnector(store, asynchronous=asynchronous, delay=3))
        assert answered(run, max_tokens=1).num_cached_tokens == 28
        assert run.executor.num_tokens_computed == 2
        stats = run.core.stats()
        assert (stats.external_query_tokens, stats.external_hit_tokens, stats.prefix_hit_tokens) == (30, 28, 0)

    def test_a_load_begins_behind_what_the_cache_has(self, store, asynchronous):
        run = harness(MemoryConnector(store, asynchronous=asynchronous))
        answered(run, "first", [*PROMPT[:8], 99], max_tokens=1)
        loaded = store.num_loaded
        assert answered(run, "second").num_cached_tokens == 28
        assert (loaded, store.num_loaded - loaded) == (2, 5)
        assert run.core.stats().prefix_hit_tokens == 8

    def test_a_prompt_whose_tokens_are_scored_is_computed(self, store, asynchronous):
        run = harness(MemoryConnector(store, asynchronous=asynchronous))
        answer = answered(run, prompt_logprobs=0)
        assert [entry and entry.token_ids[0] for entry in answer.prompt_logprobs] == [None, *PROMPT[1:]]
        assert run.core.stats().num_loads == 0

    def test_one_load_serves_all_that_begin_alike(self, store, asynchronous):
        run = harness(MemoryConnector(store, asynchronous=asynchronous, delay=2))
        for name in "abc":
            run.add(name, PROMPT, n=2)
        run.run()
        run.check_answers()
        assert run.core.stats().num_loads == 1

    @pytest.mark.parametrize("windows", [(None,), (None, 6), (3,)])
    def test_a_block_that_fails_takes_those_behind_it_along(self, store, asynchronous, windows):
        store.blocks.clear()
        answered(harness(MemoryConnector(store), windows=windows))
        hashes = [key[2] for key in store.blocks if key[1] == 0]
        store.fails = lambda block_hash: block_hash == hashes[6]  # a window of three tokens loads no other
        run = harness(MemoryConnector(store, asynchronous=asynchronous), windows=windows, max_concurrent_steps=2)
        assert answered(run).num_cached_tokens <= 24
        assert run.core.stats().num_failed_loads == 1
        assert run.core.stats().external_hit_tokens == 24

    def test_a_failed_load_can_be_an_error(self, store, asynchronous):
        store.fails = lambda _: True
        connector = MemoryConnector(store, asynchronous=asynchronous)
        run = harness(connector, connector_settings={"load_failure_policy": "fail"})
        run.add("b", [99, *PROMPT])
        answer = answered(run)
        assert (answer.finish_reason, answer.token_ids) == ("error", [])
        assert "could not be loaded" in answer.error
        assert run.answers["b", 0].finish_reason == "length"

    def test_a_producer_loads_nothing_and_a_consumer_stores_nothing(self, store, asynchronous):
        connector = MemoryConnector(store, asynchronous=asynchronous)
        answered(harness(connector, connector_settings={"role": "producer"}))
        assert (store.num_loaded, store.num_saved) == (0, 9)
        before = len(store.blocks)
        answered(harness(connector, connector_settings={"role": "consumer"}), prompt=[*PROMPT, 5, 6, 7, 8, 9])
        assert (store.num_loaded, len(store.blocks)) == (7, before)


def test_aborted_while_loading(store):
    run = harness(MemoryConnector(store, asynchronous=True, delay=5))
    run.add("a", PROMPT)
    run.step()
    assert run.core.stats().num_loading == 1
    run.core.abort(["a"])
    stats = run.core.stats()
    assert (stats.num_loading, stats.num_unfinished) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks - 7  # something may still write to them
    answered(run, "b", [7] * 20)
    assert run.core.stats().num_free_blocks == stats.num_blocks


def test_a_load_that_is_never_reported_is_computed_and_its_blocks_are_left_alone(store):
    class Silent(MemoryWorker):
        def report(self):
            report = super().report()
            return TransferReport(released=report.released)

    clock = Clock()
    run = harness(
        Halves(store, worker=Silent, asynchronous=True),
        clock=clock,
        connector_settings={"load_timeout_s": 5.0},
        trusts_connector=False,
    )
    run.add("a", PROMPT)
    for _ in range(10):
        run.step()
    assert run.core.stats().num_loading == 1
    clock.now = 5.1
    run.run()
    run.check_answers()
    assert run.core.stats().num_free_blocks == run.core.stats().num_blocks - 7
    assert "not reported within 5 s" in run.connector.breaker.last_fault


def test_an_answer_that_never_comes_is_not_waited_for_and_others_go_first(store):
    class Undecided(MemoryScheduler):
        def offer(self, request, num_computed_tokens):
            return None if request.request_id == "a" else super().offer(request, num_computed_tokens)

    clock = Clock()
    run = harness(Halves(store, Undecided), clock=clock, connector_settings={"load_timeout_s": 5.0})
    run.add("a", [50, *PROMPT])
    run.add("b", PROMPT)
    for _ in range(20):
        run.step()
    assert run.answers["b", 0].finish_reason == "length"
    assert not run.answers["a", 0].token_ids
    clock.now = 5.1
    run.run()
    run.check_answers()


def test_who_had_an_answer_and_found_no_room_may_be_asked_about_again_much_later(store):
    """The connector answers the second question, and its answer holds for three seconds."""

    clock = Clock()

    class Forgetful(MemoryScheduler):
        asked_at = -10.0

        def offer(self, request, num_computed_tokens):
            if request.request_id == "a" and clock.now > self.asked_at + 3.0:
                self.asked_at = clock.now
                return None
            return super().offer(request, num_computed_tokens)

    settings = {"num_blocks": 14, "connector_settings": {"load_timeout_s": 5.0}}
    run = harness(Halves(store, Forgetful), clock=clock, **settings)
    run.add("long", [50, *PROMPT], 16)
    run.step()
    run.add("a", PROMPT)
    while run.answers["long", 0].finish_reason is None:
        run.step()
        clock.now += 1.0
    assert clock.now > 10.0
    run.run()
    run.check_answers()
    assert not run.core.stats().plugin_faults
    assert run.core.stats().external_hit_tokens > 0


def test_blocks_of_an_ended_request_are_kept_and_its_params_come_back(store):
    class Keeping(MemoryScheduler):
        hold = None

        def request_finished(self, request, block_ids):  # noqa: ARG002
            Keeping.hold = self._context.new_id()
            return Retention((Keeping.hold,), {"remote_block_ids": list(block_ids[0])})

    class Releasing(MemoryWorker):
        released = False

        def report(self):
            report = super().report()
            if Releasing.released:
                Releasing.released = False
                return TransferReport(report.loaded, report.released | {Keeping.hold}, report.failed_blocks)
            return report

    run = harness(Halves(store, Keeping, Releasing), connector_settings={"role": "consumer"})
    run.add("a", PROMPT)
    while run.core.has_work():
        run.step()
    kept = run.answers["a", 0].kv_transfer_params["remote_block_ids"]
    stats = run.core.stats()
    assert stats.num_free_blocks == stats.num_blocks - len(kept)
    assert not run.core.scheduler.reset_prefix_cache()
    Releasing.released = True
    run.check_drained()


def test_params_without_a_connector_or_that_it_refuses_are_errors_of_the_request(store):
    class Fussy(MemoryScheduler):
        def problems(self, params):
            return [] if "host" in params else ["host is missing."]

    with pytest.raises(InvalidRequestError, match="no connector"):
        SchedulingHarness(FcfsPolicy()).add("a", PROMPT, kv_transfer_params={"host": "x"})
    run = harness(Halves(store, Fussy))
    with pytest.raises(InvalidRequestError, match="host is missing"):
        run.add("a", PROMPT, kv_transfer_params={})
    answered(run, kv_transfer_params={"host": "x"})


def test_what_the_last_request_has_filled_is_stored_although_nobody_steps_any_more():
    store = MemoryStore()
    run = harness(MemoryConnector(store))
    run.add("a", PROMPT[:5], max_tokens=1)
    while run.core.has_work():
        run.core.step()
    assert store.num_saved == 1


def test_a_plan_that_holds_too_much_is_not_carried_out():
    told = []

    class Greedy(MemoryScheduler):
        def plan_transfers(self, step):
            blocks = [block.block_id for block in step.filled]
            return TransferPlan("nonsense", {self._context.new_id(): blocks}) if blocks else None

        def update(self, report):
            told.append(report)

    run = harness(Halves(MemoryStore(), Greedy), num_blocks=9)
    answered(run, prompt=PROMPT[:24], max_tokens=4)
    assert "more than may be" in run.connector.breaker.last_fault
    assert told[0].released == told[0].failed_holds != frozenset()


def test_after_a_reset_that_failed_nothing_is_offered(store):
    class Stubborn(MemoryScheduler):
        def reset(self):
            raise RuntimeError("no")

    run = harness(Halves(store, Stubborn))
    assert run.core.reset_prefix_cache()
    answered(run)
    assert (store.num_loaded, run.core.stats().num_loads) == (0, 0)


def test_closed_twice(store):
    run = harness(MemoryConnector(store))
    answered(run)
    for _ in range(2):
        run.core.close()
        assert run.core.closed
    run.scheduler.close()
    run.executor.close()


class TestWorkerTransfers:
    class Half(MemoryWorker):
        """Notes what is called; `raises` names what fails."""

        def __init__(self, raises=""):
            self.raises, self.calls = raises, []

        def _called(self, name, answer=None):
            self.calls.append(name)
            if name == self.raises:
                raise RuntimeError(name)
            return answer

        def start_load(self, payload):
            assert payload == "payload"
            self._called("start_load")

        def wait_for_layer(self, layer):  # noqa: ARG002
            self._called("wait_for_layer")

        def save_layer(self, layer):  # noqa: ARG002
            self._called("save_layer")

        def wait_for_save(self):
            self._called("wait_for_save")

        def report(self):
            return self._called("report", TransferReport())

    STEP = StepTransfers("payload", frozenset({1, 2}), {7: frozenset({3})}, (9,))

    def run(self, half, step=STEP):
        transfers = WorkerTransfers(half, 2)
        transfers.begin(step)
        for layer in range(2):
            transfers.before_layer(layer)
            transfers.after_layer(layer)
        return transfers, transfers.finish()

    def test_the_order_of_calls(self):
        half = self.Half()
        _, report = self.run(half)
        layers = ["wait_for_layer", "save_layer"] * 2
        assert half.calls == ["start_load", *layers, "wait_for_save", "report"]
        assert not report

    @pytest.mark.parametrize("method", ["start_load", "wait_for_layer", "save_layer", "wait_for_save"])
    def test_what_raises_ends_the_transfers_of_the_step_once(self, method):
        transfers, report = self.run(self.Half(method))
        nine = frozenset({9})
        assert report == TransferReport(frozenset({7}), nine, frozenset({1, 2, 3}), {}, nine)
        assert len(transfers.take_faults()) == 1
        assert not transfers.finish()

    def test_a_step_whose_plan_was_lost_fails_likewise(self):
        _, report = self.run(self.Half(), StepTransfers(None, frozenset({1}), {7: frozenset({3})}))
        assert report == TransferReport(frozenset({7}), frozenset(), frozenset({1, 3}))

    def test_a_report_that_is_lost_fails_what_is_under_way(self):
        half = self.Half("report")
        transfers, report = self.run(half)
        assert report == TransferReport(failed_blocks=frozenset({1, 2, 3}))
        half.raises = ""
        assert not transfers.finish()

    def test_a_step_that_fails_lets_nothing_go_on(self):
        half = self.Half()
        transfers = WorkerTransfers(half, 2)
        transfers.begin(self.STEP)
        transfers.break_off()
        assert half.calls == ["start_load", "wait_for_layer", "wait_for_layer", "wait_for_save"]

    def test_what_it_never_heard_of_ends_when_it_is_asked(self):
        transfers = WorkerTransfers(self.Half(), 2)
        transfers.begin(self.STEP)
        transfers.finish()
        in_doubt = InDoubt({7: frozenset({3}), 8: frozenset({4, 5})}, frozenset({9, 10}))
        transfers.begin(StepTransfers(in_doubt=in_doubt))
        ten = frozenset({10})
        assert transfers.finish() == TransferReport(frozenset({8}), ten, frozenset({4, 5}), {}, ten)
        assert not transfers.finish()

    def test_whose_end_it_has_told_ends_again_when_it_is_asked(self):
        class Released(self.Half):
            def report(self):
                return TransferReport(frozenset({7}), frozenset({9}))

        transfers, _ = self.run(Released())
        transfers._half = self.Half()
        transfers.begin(StepTransfers(in_doubt=InDoubt({7: frozenset({3})}, frozenset({9}))))
        nine = frozenset({9})
        assert transfers.finish() == TransferReport(frozenset({7}), nine, frozenset({3}), {}, nine)


def test_reports_of_several_workers_count_once_all_have_reported():
    merger = ReportMerger(2)
    first = merger.merge([TransferReport(frozenset({1}), frozenset({5, 6}), frozenset({3}), {"n": 1}), None])
    assert first == TransferReport(failed_blocks=frozenset({3}), counts={"n": 1})
    six = frozenset({6})
    second = merger.merge([TransferReport(frozenset({2})), TransferReport(frozenset({1}), six, counts={"n": 2})])
    assert second == TransferReport(frozenset({1}), six, counts={"n": 2})
    third = merger.merge(
        [TransferReport(), TransferReport(frozenset({2}), frozenset({5}), failed_holds=frozenset({5}))]
    )
    assert third == TransferReport(frozenset({2}), frozenset({5}), failed_holds=frozenset({5}))
