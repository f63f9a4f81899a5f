"""What becomes of requests when the engine process dies, hangs or misbehaves."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from llmkit.errors import EngineClosedError, EngineDeadError, EngineError
from llmkit.testing.fake_engine import FakeBuilder, fake_tokens

PATIENT = {"max_restarts": 50}


@pytest.fixture
def no_delays(monkeypatch):
    monkeypatch.setattr("llmkit.engine.process.restarts.FIRST_DELAY_S", 0.001)


def test_streams_go_on_through_any_number_of_deaths(running, request_of):
    requests = [request_of(f"r{i}", 120, (1, i), seed=i, n=1 + i % 3) for i in range(16)]

    async def scenario(run):
        run.add(*requests)
        for kill in range(1, 5):
            await run.until_tokens("r3", 20 * kill)
            run.kill()
        await run.until_ended(*(r.request_id for r in requests))
        await run.until(lambda: len(run.ends) == sum(r.sampling_params.n for r in requests))
        run.check(*requests)
        assert run.client.health.num_restarts == 4

    running(scenario, **PATIENT)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
def test_any_signal_is_noticed_at_once(running, request_of, number):
    async def scenario(run):
        first = request_of("a", 100)
        run.add(first)
        await run.until_tokens("a", 3)
        before = time.monotonic()
        run.kill(number)
        await run.until_tokens("a", 20)
        assert time.monotonic() - before < 5
        await run.until_ended("a")
        run.check(first)

    running(scenario, heartbeat_timeout_s=60)


def test_a_group_of_processes_that_is_told_to_end_keeps_the_engine(running, request_of):
    """Ctrl-C and a stop of the service reach every process; when the engine ends is the parent's decision."""

    async def scenario(run):
        request = request_of("a", 60)
        run.add(request)
        await run.until_tokens("a", 3)
        for number in (signal.SIGINT, signal.SIGTERM):
            run.kill(number)
        await run.until_ended("a")
        run.check(request)
        assert run.client.health.num_restarts == 0

    running(scenario)


@pytest.mark.parametrize("fault", ["kill", "exit"])
def test_a_request_that_kills_twice_fails_alone(running, request_of, fault):
    others = [request_of(f"r{i}", 80, (i,)) for i in range(8)]

    async def scenario(run):
        run.add(*others[:4], request_of("bad", 40, extra_args={"fault": fault, "at": 10}), *others[4:])
        await run.until_ended("bad", *(other.request_id for other in others))
        run.check(*others)
        assert run.tokens["bad", 0] == fake_tokens((1, 2), 0, 10)
        assert run.ends["bad", 0] == "error"
        assert "while it computed this request" in run.errors["bad", 0]
        assert run.client.health.num_restarts == 4  # two with everybody, two with the suspect on trial
        assert run.client.health.ready

    running(scenario)


def test_a_request_that_kills_alone_is_found_in_two_crashes(running, request_of):
    async def scenario(run):
        run.add(request_of("bad", 40, extra_args={"fault": "segfault"}))
        await run.until_ended("bad")
        assert run.client.health.num_restarts == 1 + 1
        after = request_of("after")
        run.add(after)
        await run.until_ended("after")
        run.check(after)

    running(scenario)


@pytest.mark.usefixtures("no_delays")
@pytest.mark.parametrize("spread", [0, 15])
@pytest.mark.parametrize(("num_bad", "num_others"), [(2, 0), (3, 0), (3, 8)])
def test_independent_requests_that_kill_fail_alone_and_the_engine_goes_on(
    running, request_of, num_bad, num_others, spread
):
    others = [request_of(f"r{i}", 80, (i,)) for i in range(num_others)]
    bad = [request_of(f"bad{i}", 60, extra_args={"fault": "kill", "at": 1 + i * spread}) for i in range(num_bad)]

    async def scenario(run):
        run.add(*others[:4], *bad, *others[4:])
        await run.until_ended(*(request.request_id for request in (*bad, *others)))
        run.check(*others)
        for i, request in enumerate(bad):
            assert run.ends[request.request_id, 0] == "error"
            assert run.tokens[request.request_id, 0] == fake_tokens((1, 2), 0, 1 + i * spread)
        after = request_of("after")
        run.add(after)
        await run.until_ended("after")
        run.check(after)

    running(scenario)


@pytest.mark.usefixtures("no_delays")
@pytest.mark.parametrize("at", [-1, 0, 2])
def test_any_number_of_requests_that_kill_and_nobody_else(running, request_of, at):
    async def scenario(run):
        for i in range(4):
            run.add(request_of(f"bad{i}", 40, extra_args={"fault": "kill", "at": at}))
            await run.until_ended(f"bad{i}")
            assert run.ends[f"bad{i}", 0] == "error"
        assert run.client.health.num_restarts == 2 * 4
        after = request_of("after")
        run.add(after)
        await run.until_ended("after")
        run.check(after)

    running(scenario, max_restarts=2)


@pytest.mark.usefixtures("no_delays")
def test_requests_that_kill_and_are_aborted_before_they_are_found(running, request_of):
    async def scenario(run):
        for i in range(6):
            run.add(request_of(f"bad{i}", 40, extra_args={"fault": "kill"}))
            while run.client.health.num_restarts == i:
                await asyncio.sleep(0.001)
            run.client.abort([f"bad{i}"])
            await run.client.call("stats")
        assert run.client.health.alive

    running(scenario, max_restarts=2)


@pytest.mark.usefixtures("no_delays")
def test_a_request_that_kills_while_only_others_are_computed_is_found_and_the_others_go_on(running, request_of):
    """As a grammar could that is read in a thread, or a transfer."""
    others = [request_of(f"r{i}", 200, (i,)) for i in range(4)]

    async def scenario(run):
        run.add(*others[:2], request_of("bad", 40, extra_args={"fault": "kill", "after_steps": 20}), *others[2:])
        await run.until_ended("bad", *(other.request_id for other in others))
        assert run.ends["bad", 0] == "error"
        run.check(*others)

    running(scenario, max_restarts=2)


@pytest.mark.usefixtures("no_delays")
def test_an_engine_that_dies_of_whatever_it_is_asked_is_given_up(running, request_of, tmp_path):
    """The requests are not to blame, which the engine's death of a harmless one shows."""
    fatal = tmp_path / "fatal"

    async def scenario(run):
        fatal.touch()
        run.add(request_of("a"), request_of("b"))
        with pytest.raises(EngineDeadError, match=r"crashed 3 times in 60 s(?s:.*)SIGSEGV"):
            await run.until_ended("a", "b")
        assert len(run.ends) == 1

    running(scenario, FakeBuilder(fatal_steps=str(fatal)), max_restarts=2)


@pytest.mark.parametrize(
    ("fault", "limits"),
    [("hang", {"hang_timeout_s": 1.5}), ("freeze", {"heartbeat_timeout_s": 2.5})],
)
def test_a_hang_is_ended(running, request_of, tmp_path, fault, limits):
    once = {"fault": fault, "at": 3, "once": str(tmp_path / "once")}

    async def scenario(run):
        request = request_of("a", 20, extra_args=once)
        run.add(request)
        await run.until_ended("a")
        run.check(request)
        assert run.client.health.num_restarts == 1

    running(scenario, heartbeat_s=0.1, **limits)


def test_a_long_step_is_no_hang(running, request_of):
    """The limit is one that a process on a busy machine keeps, too."""

    async def scenario(run):
        request = request_of("a", 1)
        run.add(request)
        await run.until_ended("a")
        run.check(request)
        assert run.client.health.num_restarts == 0

    running(scenario, FakeBuilder(step_s=2.8), heartbeat_s=0.05, heartbeat_timeout_s=2.0)


def test_a_wake_up_may_take_as_long_as_the_start(running):
    """It reads the weights again; whoever hangs in anything else is ended."""

    async def scenario(run):
        await run.client.call("sleep", 2)
        await run.client.call("wake_up", None)
        assert run.client.health.num_restarts == 0
        with pytest.raises(EngineError, match=r"at one thing \(sleep_s\)"):
            await run.client.call("sleep_s", 60)
        await run.client.call("stats")  # of the next one
        assert run.client.health.num_restarts == 1

    running(scenario, FakeBuilder(load_s=1.4), heartbeat_s=0.05, hang_timeout_s=1.0)


def test_an_idle_process_that_dies_is_started_again(running, request_of):
    async def scenario(run):
        pid = await run.client.call("pid")
        run.kill()
        await run.client.call("stats")  # which is asked again if it was sent to the dead one
        assert await run.client.call("pid") != pid
        request = request_of("a")
        run.add(request)
        await run.until_ended("a")
        run.check(request)

    running(scenario)


def test_requests_that_come_during_a_restart_wait_for_its_end(running, request_of):
    async def scenario(run):
        run.kill()
        late, gone = request_of("late"), request_of("gone")
        run.add(late, gone)
        run.client.abort(["gone"])
        await run.until_ended("late")
        run.check(late)
        assert ("gone", 0) not in run.tokens

    running(scenario, FakeBuilder(load_s=0.3))


def test_repeated_crashes_are_given_up_with_the_cause(running, request_of, tmp_path):
    broken = tmp_path / "broken"

    async def scenario(run):
        run.add(request_of("a", 1000))
        await run.until_tokens("a", 3)
        broken.touch()
        run.kill()
        with pytest.raises(EngineDeadError) as caught:
            await run.until_ended("a")
        assert "crashed 3 times in 60 s" in str(caught.value)
        assert "SIGSEGV" in str(caught.value)
        assert "the device is on fire" in str(caught.value)
        with pytest.raises(EngineDeadError):
            run.add(request_of("b"))
        with pytest.raises(EngineDeadError):
            await run.client.call("stats")
        run.client.abort(["a"])  # by somebody who has not heard of it yet
        run.client.abort_sequences([("a", 0)])
        health = run.client.health
        assert (health.alive, health.ready) == (False, False)
        assert "on fire" in health.error

    running(scenario, FakeBuilder(step_s=0.002, broken=str(broken)), max_restarts=2)


def test_health_while_it_is_started_again(running, request_of):
    async def scenario(run):
        assert run.client.health.ready
        run.add(request_of("a", 200))
        await run.until_tokens("a", 3)
        run.kill()
        while run.client.health.ready:
            await asyncio.sleep(0.001)
        health = run.client.health
        assert health.alive
        assert health.error is None
        await run.until_tokens("a", 10)
        assert run.client.health.ready
        await run.until_ended("a")
        assert run.client.health.stuck_s == 0.0

    running(scenario, FakeBuilder(step_s=0.002, load_s=0.3))


def test_a_stuck_step_shows_in_the_health(running, request_of):
    async def scenario(run):
        run.add(request_of("a", extra_args={"fault": "hang", "at": 2}))
        await run.until_tokens("a", 2)
        while run.client.health.stuck_s < 0.3:
            await asyncio.sleep(0.01)
        assert run.client.health.alive

    running(scenario, stop_timeout_s=0.1)


def test_a_broken_step_ends_its_requests_only(running, request_of):
    async def scenario(run):
        run.add(request_of("bad", extra_args={"fault": "fail", "at": 2}), good := request_of("good"))
        await run.until_ended("bad", "good")
        assert (run.ends["bad", 0], run.errors["bad", 0]) == ("error", "This request fails.")
        run.check(good)
        assert run.client.health.num_restarts == 0

    running(scenario)


def test_refusals_come_as_outputs(running, request_of):
    async def scenario(run):
        run.add(request_of("no", n=2, extra_args={"fault": "refuse"}))
        await run.until_ended("no", n=2)
        assert run.errors["no", 1] == "This request is refused."
        assert run.params["no", 0] == "prompt"

    running(scenario)


def test_an_id_that_is_in_use_is_refused_and_the_first_goes_on(running, request_of):
    """The refusal has the id of both, so it comes between the tokens of the first."""

    async def scenario(run):
        run.add(first := request_of("a", 200), request_of("a"))
        told = []
        while not any(output.finish_reason == "length" for output in told):
            told += await asyncio.wait_for(run.client.outputs(), 30)
        (refusal,) = [output for output in told if output.finish_reason == "error"]
        assert "'a' is already being served" in refusal.error
        assert refusal.error_param == "request_id"
        tokens = [token for output in told for token in output.new_token_ids]
        assert tokens == fake_tokens(first.prompt_token_ids, 0, 200)

    running(scenario)


def test_what_cannot_be_sent_is_refused(running, request_of):
    async def scenario(run):
        run.add(request_of("odd", extra_args={"thing": object()}), good := request_of("good"))
        await run.until_ended("odd", "good")
        assert "cannot be sent" in run.errors["odd", 0]
        assert run.params["odd", 0] == "extra_args"
        run.check(good)

    running(scenario)


def test_aborts_of_requests_and_of_single_sequences(running, request_of):
    async def scenario(run):
        run.add(request_of("gone", 5000), request_of("part", 50, n=3))
        await run.until_tokens("gone", 3)
        run.client.abort(["gone", "unknown"])
        run.client.abort_sequences([("part", 1), ("unknown", 0)])
        await run.until(lambda: ("part", 0) in run.ends and ("part", 2) in run.ends)
        run.kill()
        assert (await run.client.call("stats")).num_unfinished == 0
        again = request_of("gone", 7, (9, 9))
        run.tokens.pop(("gone", 0))
        run.add(again)
        await run.until_ended("gone")
        run.check(again)

    running(scenario)


class TestCalls:
    def test_answers_and_errors(self, running):
        async def scenario(run):
            assert await run.client.call("echo", 1, "two", [3]) == (1, "two", [3])
            with pytest.raises(EngineError, match="no utility 'nothing'"):
                await run.client.call("nothing")

        running(scenario)

    def test_a_call_that_kills_fails_and_is_not_repeated(self, running):
        async def scenario(run):
            with pytest.raises(EngineError, match="died before it had answered exit"):
                await run.client.call("exit")
            assert (await run.client.call("stats")).num_steps == 0
            assert run.client.health.num_restarts == 1

        running(scenario)

    @pytest.mark.parametrize(
        ("calls", "repeated"),
        [
            ([("sleep", 1)], [("sleep", 1)]),
            ([("sleep", 1), ("wake_up", ["weights"])], [("sleep", 1), ("wake_up", ["weights"])]),
            ([("sleep", 1), ("wake_up", ["weights"]), ("wake_up", None)], []),
            ([("sleep", 2), ("wake_up",)], []),
        ],
    )
    def test_a_process_that_slept_sleeps_when_it_is_started_again(self, running, calls, repeated):
        async def scenario(run):
            for call in calls:
                await run.client.call(*call)
            for _ in range(2):
                run.kill()
                await run.client.call("stats")
                assert await run.client.call("sleeping") == repeated

        running(scenario)

    def test_a_cancelled_call_disturbs_nobody(self, running):
        async def scenario(run):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(run.client.call("sleep_s", 0.2), 0.01)
            assert await run.client.call("echo") == ()

        running(scenario)


def test_nothing_works_after_the_end(running, request_of):
    async def scenario(run):
        waiting = asyncio.create_task(run.client.outputs())
        await asyncio.sleep(0)
        await run.client.close()
        with pytest.raises(EngineClosedError):
            await waiting
        with pytest.raises(EngineClosedError):
            run.add(request_of("a"))
        with pytest.raises(EngineClosedError):
            await run.client.call("stats")
        run.client.abort(["a"])
        assert not run.client.health.alive

    running(scenario)


def test_a_slow_reader_loses_nothing(running, request_of):
    async def scenario(run):
        request = request_of("a", 3000)
        run.add(request)
        await run.client.call("sleep_s", 0.1)
        time.sleep(0.5)  # the event loop stands still meanwhile
        await run.until_ended("a")
        run.check(request)

    running(scenario, FakeBuilder())
