"""The engine in a thread, with a fake model."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from llmkit.engine.thread_client import MAX_BROKEN_STEPS, ThreadClient
from llmkit.errors import EngineClosedError, EngineDeadError, EngineError
from llmkit.requests.message import EngineRequest
from llmkit.requests.sampling_params import SamplingParams
from llmkit.testing.fake_executor import fake_answer
from llmkit.testing.scheduling import SchedulingHarness
from llmkit_schedulers.fcfs import FcfsPolicy


def request(name, prompt=(1, 2, 3), max_tokens=6, n=1, **fields):
    return EngineRequest(
        request_id=name,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(seed=0, n=n, max_tokens=max_tokens),
        max_tokens=max_tokens,
        **fields,
    )


class Gate:
    """Holds the engine before each step while it is shut."""

    def __init__(self):
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()

    def __call__(self, _):
        self.reached.set()
        assert self.open.wait(30)


class Run:
    """A client of an engine with a fake model; `answers` are the outputs by request."""

    def __init__(self, before_step=None, **settings):
        self.harness = SchedulingHarness(FcfsPolicy(), before_step=before_step, **settings)
        self.core = self.harness.core
        self.closed = False
        self.client = ThreadClient(lambda: SimpleNamespace(core=self.core, close=self.close))
        self.answers = {}

    def close(self):
        self.closed = True
        self.core.close()

    async def until_done(self, names):
        ended = {}
        while set(ended) != set(names):
            for output in await self.client.outputs():
                self.answers.setdefault((output.request_id, output.index), []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    ended[output.request_id] = output
        return ended


@pytest.fixture
def run_engine():
    """Calls an async function with a Run, closes that."""

    def call(function, before_step=None, **settings):
        async def main():
            run = Run(before_step, **settings)
            try:
                await asyncio.wait_for(function(run), 60)
            finally:
                await run.client.close()
            assert run.closed

        asyncio.run(main())

    return call


def test_answers_arrive_and_all_is_given_back(run_engine):
    async def main(run):
        for name in "abc":
            run.client.add([request(name, [ord(name)] * 5)])
        await run.until_done("abc")
        for name in "abc":
            assert run.answers[name, 0] == fake_answer([ord(name)] * 5, 0, 6)
        stats = await run.client.call("stats")
        assert (stats.num_unfinished, stats.num_free_blocks) == (0, stats.num_blocks)
        assert run.client.health.ready
        assert run.client.health.stuck_s == 0.0

    run_engine(main)


def test_a_refusal_comes_as_an_output_for_each_sequence(run_engine):
    async def main(run):
        run.client.add([request("long", [1] * 500, n=2)])
        run.client.add([request("good")])
        outputs = []
        while not any(output.request_id == "good" and output.finish_reason for output in outputs):
            outputs += await run.client.outputs()
        refused = [output for output in outputs if output.request_id == "long"]
        assert [(o.index, o.finish_reason, o.error_param) for o in refused] == [(i, "error", "prompt") for i in (0, 1)]
        assert "500" in refused[0].error

    run_engine(main)


def test_an_abort_takes_out_what_the_engine_has_not_seen(run_engine):
    gate = Gate()

    async def main(run):
        gate.open.clear()
        run.client.add([request("first")])
        assert await asyncio.to_thread(gate.reached.wait, 30)
        for number in range(50):
            run.client.add([request(f"late{number}")])
        run.client.abort(f"late{number}" for number in range(50))
        run.client.add([request("late0", [9])])  # the id can be used again at once
        gate.open.set()
        await run.until_done(["first", "late0"])
        assert set(run.answers) == {("first", 0), ("late0", 0)}
        assert run.answers["late0", 0] == fake_answer([9], 0, 6)

    run_engine(main, gate)


def test_a_call_finds_what_was_handed_over_before_it(run_engine):
    gate = Gate()

    async def main(run):
        gate.open.clear()
        run.client.add([request("first")])
        assert await asyncio.to_thread(gate.reached.wait, 30)
        run.client.add([request("second")])
        call = asyncio.ensure_future(run.client.call("stats"))
        await asyncio.sleep(0)
        gate.open.set()
        stats = await call
        assert stats.num_running + stats.num_waiting == 2
        await run.until_done(["first", "second"])

    run_engine(main, gate)


def test_an_abort_in_the_engine(run_engine):
    async def main(run):
        run.client.add([request("endless", max_tokens=120)])
        await run.client.outputs()
        run.client.abort(["endless", "unknown"])
        stats = await run.client.call("stats")
        while stats.num_unfinished:
            stats = await run.client.call("stats")
        assert stats.num_free_blocks == stats.num_blocks

    run_engine(main)


def test_one_sequence_ends_and_the_others_go_on(run_engine):
    gate = Gate()
    gate.open.clear()

    async def main(run):
        run.client.add([request("pair", n=2, max_tokens=20)])
        await asyncio.to_thread(gate.reached.wait, 30)
        run.client.abort_sequences([("pair", 1)])
        gate.open.set()
        while (await run.client.call("stats")).num_unfinished:
            pass
        await run.client.outputs()
        assert [len(finished.finish_reasons) for finished in run.harness.finished] == [2]
        assert run.harness.finished[0].finish_reasons[1] == "abort"

    run_engine(main, gate)


def test_utilities_raise_what_they_raise(run_engine):
    async def main(run):
        assert await run.client.call("reset_prefix_cache") is True
        with pytest.raises(EngineError, match=r"no utility 'dance'; it has stats"):
            await run.client.call("dance")
        with pytest.raises(TypeError):
            await run.client.call("stats", "too", "many")

    run_engine(main)


def test_a_failed_start_is_raised_where_it_was_asked_for():
    def build():
        raise EngineError("no model here")

    with pytest.raises(EngineError, match="no model here"):
        ThreadClient(build)


def test_a_step_that_is_broken_off_ends_its_requests_and_no_others(run_engine):
    broken = [True]

    def before_step(_):
        if broken.pop() if broken else False:
            raise SystemExit("a plugin's idea")

    async def main(run):
        run.client.add([request("a")])
        ended = await run.until_done("a")
        assert ended["a"].finish_reason == "error"
        assert "SystemExit: a plugin's idea" in ended["a"].error
        run.client.add([request("b")])
        await run.until_done("b")
        assert run.answers["b", 0] == fake_answer([1, 2, 3], 0, 6)
        assert run.client.health.alive

    run_engine(main, before_step)


def test_an_engine_that_can_do_nothing_dies_with_its_cause(run_engine):
    def before_step(_):
        raise SystemExit("always")

    async def main(run):
        async def use():
            for number in range(100):
                run.client.add([request(f"a{number}")])
                await run.client.outputs()

        with pytest.raises(EngineDeadError, match=f"{MAX_BROKEN_STEPS} steps in a row failed.*SystemExit: always"):
            await use()
        with pytest.raises(EngineDeadError, match="always"):
            run.client.add([request("b")])
        with pytest.raises(EngineDeadError, match="always"):
            await run.client.call("stats")
        health = run.client.health
        assert (health.alive, health.ready) == (False, False)
        assert "always" in health.error

    run_engine(main, before_step)


def test_health_tells_a_stuck_engine(run_engine):
    gate = Gate()

    async def main(run):
        gate.open.clear()
        run.client.add([request("a")])
        await asyncio.to_thread(gate.reached.wait, 30)
        before = run.client.health.stuck_s
        while run.client.health.stuck_s <= before:
            await asyncio.sleep(0)
        assert run.client.health.alive
        gate.open.set()
        await run.until_done("a")
        while run.client.health.stuck_s:
            await asyncio.sleep(0)

    run_engine(main, gate)


def test_after_close(run_engine):
    async def main(run):
        waiting = asyncio.create_task(run.client.outputs())
        await asyncio.sleep(0)
        await run.client.close()
        await run.client.close()
        with pytest.raises(EngineClosedError):
            await waiting
        with pytest.raises(EngineClosedError):
            run.client.add([request("a")])
        with pytest.raises(EngineClosedError):
            await run.client.call("stats")
        run.client.abort(["a"])  # may cross the end
        assert not run.client.health.alive

    run_engine(main)


def test_a_forgotten_client_ends_its_thread():
    before = set(threading.enumerate())
    run = Run()
    (thread,) = (t for t in set(threading.enumerate()) - before if t.name == "llmkit-engine")
    del run.client
    thread.join(30)
    assert not thread.is_alive()
    assert run.closed
