"""Several connectors as one, in a whole engine with a fake model that checks every block it reads."""

from __future__ import annotations

import random

import pytest

from llmkit.config import load_config
from llmkit.errors import ConfigError, PluginError
from llmkit.execution.connector_half import build_connector
from llmkit.hookspecs import Environment
from llmkit.hookspecs.connector import Retention
from llmkit.registry import Registry
from llmkit.testing.hostile_connector import FlakyConnector, HostileConnector
from llmkit.testing.memory_connector import MemoryConnector, MemoryScheduler, MemoryStore, MemoryWorker
from llmkit.testing.scheduling import SchedulingHarness
from llmkit_connectors.multi.connector import MultiConnector
from llmkit_schedulers.fcfs import FcfsPolicy

PROMPT = list(range(30))


def harness(*connectors, **settings):
    members = [(f"member-{i}", connector) for i, connector in enumerate(connectors)]
    return SchedulingHarness(FcfsPolicy(), num_blocks=40, connector=MultiConnector(members), **settings)


def answered(run, prompt=PROMPT, **fields):
    run.add("a", prompt, **fields)
    run.run()
    run.check_answers()
    return run.answers["a", 0]


def test_all_store():
    stores = MemoryStore(), MemoryStore()
    answered(harness(*map(MemoryConnector, stores)))
    assert stores[0].blocks.keys() == stores[1].blocks.keys() != set()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_one_that_offers_most_loads_and_the_others_store_what_it_brings(asynchronous):
    long = MemoryStore()
    answered(harness(MemoryConnector(long)))
    short = MemoryStore(dict(list(long.blocks.items())[:2]))
    answered(harness(MemoryConnector(short), MemoryConnector(long, asynchronous=asynchronous, delay=2)))
    assert (short.num_loaded, long.num_loaded) == (0, 7)
    assert short.blocks.keys() == long.blocks.keys()


def test_of_equal_offers_the_first_is_taken():
    stores = MemoryStore(), MemoryStore()
    answered(harness(*map(MemoryConnector, stores)))
    answered(harness(*map(MemoryConnector, stores)))
    assert (stores[0].num_loaded, stores[1].num_loaded) == (7, 0)


def test_what_fails_in_one_is_computed_and_the_others_go_on():
    stores = MemoryStore(), MemoryStore()
    answered(harness(*map(MemoryConnector, stores)))
    stores[0].fails = lambda _: True
    run = harness(*map(MemoryConnector, stores))
    answered(run)
    assert run.core.stats().num_failed_loads == 1


def fails(*_):
    raise RuntimeError("a member that fails")


class RaisingScheduler(MemoryScheduler):
    offer = plan_transfers = request_finished = update = problems = reset = close = fails


class RaisingWorker(MemoryWorker):
    start_load = report = wait_for_layer = wait_for_save = cancel = fails


class RaisingConnector(MemoryConnector):
    def scheduler_half(self, context):
        return RaisingScheduler(self._store, context, False)

    def worker_half(self, context):
        return RaisingWorker(self._store, context, 0)


def test_a_member_that_raises_does_not_disturb_the_others():
    store = MemoryStore()
    for loaded in (0, 7):
        run = harness(RaisingConnector(MemoryStore()), MemoryConnector(store, asynchronous=True))
        answered(run)
        assert store.num_loaded == loaded
        assert not run.connector.breaker.num_faults
        assert run.core.stats().plugin_faults.keys() == {"connector:member-0"}


class WorkerOfOneRaises(MemoryConnector):
    """Only what moves bytes is broken."""

    def worker_half(self, context):
        return RaisingWorker(self._store, context, 0)


def nested(*connectors):
    return MultiConnector([(f"inner-{i}", connector) for i, connector in enumerate(connectors)])


def test_faults_of_a_members_worker_are_that_members_and_it_is_left_alone(caplog):
    store = MemoryStore()
    run = harness(MemoryConnector(store), WorkerOfOneRaises(MemoryStore()))
    for number in range(8):
        run.add(f"r{number}", [number, *PROMPT])
        run.run()
    run.check_answers()
    faults = run.core.stats().plugin_faults
    assert faults.keys() == {"connector:member-1"}
    assert faults["connector:member-1"].state == "open"
    assert "a member that fails" in faults["connector:member-1"].last_fault
    assert len(store.blocks) >= 8 * 7
    assert len([record for record in caplog.records if "member-1" in record.message]) == 2  # first fault, left alone


def test_faults_within_nested_ones_are_the_innermosts():
    run = harness(
        MemoryConnector(MemoryStore()), nested(WorkerOfOneRaises(MemoryStore()), MemoryConnector(MemoryStore()))
    )
    answered(run)
    assert run.core.stats().plugin_faults.keys() == {"connector:inner-0"}


def test_two_members_of_one_name_are_told_apart():
    same = [("twin", MemoryConnector(MemoryStore())), ("twin", WorkerOfOneRaises(MemoryStore()))]
    run = SchedulingHarness(FcfsPolicy(), num_blocks=40, connector=MultiConnector(same))
    answered(run)
    assert run.core.stats().plugin_faults.keys() == {"connector:twin #2"}


def test_members_together_hold_no_more_than_one_may():
    """What each holds is a part of what may be held, so that none is refused because of the others."""
    stores = [MemoryStore() for _ in range(3)]
    run = harness(*(MemoryConnector(store, delay=3) for store in stores))
    for number in range(6):
        run.add(f"r{number}", [number] * 9)
    run.run()
    assert not run.core.stats().plugin_faults
    assert all(store.blocks for store in stores)


@pytest.mark.parametrize("seed", range(30))
def test_members_that_fail_dawdle_and_lie(seed):
    rng = random.Random(seed)
    now = [0.0]

    def clock():
        now[0] += 0.01
        return now[0]

    members = [
        FlakyConnector(MemoryStore(), seed),
        HostileConnector(MemoryStore(), seed),
        MemoryConnector(MemoryStore()),
    ]
    run = harness(
        *rng.sample(members, 3),
        max_num_seqs=rng.randint(1, 4),
        max_concurrent_steps=rng.choice([1, 2]),
        windows=rng.choice([(None,), (None, 6)]),
        connector_settings={"load_timeout_s": 1.0},
        trusts_connector=False,
        clock=clock,
    )
    for number in range(12):
        run.add(
            f"r{number}",
            [rng.choice([0, 1]) for _ in range(rng.randint(1, 30))],
            rng.randint(1, 8),
            n=rng.choice([1, 2]),
        )
        if rng.random() < 0.2:
            run.core.abort([f"r{rng.randrange(number + 1)}"])
        for _ in range(rng.randint(0, 4)):
            run.step()
    run.run()
    run.check_answers()


class Answering(MemoryScheduler):
    """Wants params and returns some."""

    def __init__(self, *arguments, params):
        super().__init__(*arguments)
        self._params = params

    def problems(self, params):
        return [] if "known" in params else [f"{self._params} is not known."]

    def request_finished(self, request, block_ids):  # noqa: ARG002
        return Retention(params=self._params)


class AnsweringConnector(MemoryConnector):
    def __init__(self, params):
        super().__init__(MemoryStore())
        self._params = params

    def scheduler_half(self, context):
        return Answering(self._store, context, False, params=self._params)


def test_params_are_checked_by_all_and_those_of_all_come_back():
    run = harness(AnsweringConnector({"a": 1, "both": 1}), AnsweringConnector({"b": 2, "both": 2}))
    with pytest.raises(Exception, match=r"\{'a'.*known\. \{'b'.*known\."):
        run.add("refused", PROMPT, kv_transfer_params={"other": 1})
    assert answered(run, kv_transfer_params={"known": 1}).kv_transfer_params == {"a": 1, "b": 2, "both": 1}


class TestOptions:
    def build(self, connectors):
        extra = {"kv_connector": "multi", "kv_connector_extra_config": {"connectors": connectors}}
        config = load_config(flags={"kv_transfer_config": extra}, env={}).config
        return build_connector(config, Registry.discover(config.plugins), Environment())

    def test_members_are_built_with_their_options(self):
        connector = self.build(
            [
                {"name": "offload", "options": {"host_gib": 0.5}},
                {"kv_connector": "offload", "kv_connector_extra_config": {}},
            ]
        )
        assert [name for name, _ in connector._members] == ["offload", "offload"]
        assert connector._members[0][1] is not connector._members[1][1]

    @pytest.mark.parametrize(
        ("connectors", "error", "words"),
        [
            ([], ConfigError, "at least 1"),
            ([{"name": "none_such"}], PluginError, "none_such"),
            ([{"name": "offload", "options": {"no_such_option": 1}}], ConfigError, "no_such_option"),
            ([{"nam": "offload"}], ConfigError, "name"),
        ],
    )
    def test_members_that_cannot_be(self, connectors, error, words):
        with pytest.raises(error, match=words):
            self.build(connectors)

    def test_one_that_contains_itself_is_refused(self):
        deep = [{"name": "offload"}]
        for _ in range(6):
            deep = [{"name": "multi", "options": {"connectors": deep}}]
        with pytest.raises(ConfigError, match="nested"):
            self.build(deep)
