"""What AsyncRequestLoop hands over and when, with a client that only notes it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time

import pytest

from llmkit.config import EngineConfig
from llmkit.engine.process import messages
from llmkit.engine.process.engine_process import Launch
from llmkit.engine.process_client import ProcessClient
from llmkit.errors import EngineClosedError, EngineDeadError, EngineDrainingError, RequestTimeoutError
from llmkit.frontend import hand_over
from llmkit.frontend.async_request_loop import AsyncRequestLoop
from llmkit.frontend.output_processor import OutputProcessor
from llmkit.frontend.prompts import RequestOptions
from llmkit.requests.message import EngineOutput
from llmkit.requests.sampling_params import SamplingParams
from llmkit.testing.fake_engine import FakeBuilder, fake_tokens


class Client:
    """An engine that answers each request with one token when `answer` is called."""

    def __init__(self):
        self.events = []
        self.dead = None
        self._news = {}

    def add(self, requests):
        if self.dead is not None:
            raise self.dead
        self.events.append(("add", [request.prompt_token_ids[0] for request in requests]))
        self._here().put_nowait(requests)

    def abort(self, request_ids):
        self.events.append(("abort", len(list(request_ids))))

    async def call(self, method):
        self.events.append((method, []))

    async def outputs(self):
        requests = await self._here().get()
        return [
            EngineOutput(request_id=r.request_id, index=0, new_token_ids=[65], finish_reason="length") for r in requests
        ]

    async def close(self):
        pass

    def _here(self):
        return self._news.setdefault(asyncio.get_running_loop(), asyncio.Queue())


class Trial:
    def __init__(self, processor):
        self.client = Client()
        self.loop = AsyncRequestLoop(self.client, OutputProcessor(None))
        self._processor = processor

    def submit(self, number, timeout=None, priority=0, **sampling):
        params = SamplingParams(**({"max_tokens": 1, "detokenize": False} | sampling))
        options = RequestOptions(priority=priority)
        return self.loop.submit(self._processor.prepare({"prompt_token_ids": [number]}, params, options), timeout)


@pytest.fixture(autouse=True)
def _turns_alone_count(monkeypatch):
    """How long requests are held at most is a matter of `test_hand_over.py`: here a pause of the machine, or a
    collection of all that other tests have left, sends nothing on its way."""
    monkeypatch.setattr(hand_over, "LONGEST_S", 60.0)


@pytest.fixture
def run(make_processor):
    def call(scenario):
        async def main():
            trial = Trial(make_processor(None))
            await asyncio.wait_for(scenario(trial), 30)
            await trial.loop.close()

        asyncio.run(main())

    return call


async def ended(submission):
    return [output async for output in submission][-1].outputs[0].finish_reason


def test_an_engine_that_rests_gets_together_what_many_tasks_submit(run):
    async def scenario(trial):
        async def task(number):
            await asyncio.sleep(0)
            return await ended(trial.submit(number))

        assert await asyncio.gather(*map(task, range(5))) == ["length"] * 5
        assert trial.client.events == [("add", [0, 1, 2, 3, 4])]
        assert await task(5) == "length"
        assert trial.client.events[1:] == [("add", [5])]

    run(scenario)


def test_while_it_has_something_each_goes_at_once(run):
    async def scenario(trial):
        first = trial.submit(0)
        await trial.loop.call("stats")
        second = trial.submit(1)
        assert trial.client.events == [("add", [0]), ("stats", []), ("add", [1])]
        assert await asyncio.gather(ended(first), ended(second)) == ["length"] * 2

    run(scenario)


def test_what_is_aborted_before_it_went_is_not_known_to_the_engine(run):
    async def scenario(trial):
        first, second = trial.submit(0), trial.submit(1)
        first.abort()
        assert await ended(first) == "abort"
        assert await ended(second) == "length"
        assert trial.client.events == [("add", [1])]

    run(scenario)


def test_a_timeout_of_zero_ends_what_is_held(run):
    async def scenario(trial):
        with pytest.raises(RequestTimeoutError):
            await ended(trial.submit(0, timeout=0.0))
        assert trial.loop.num_unfinished == 0

    run(scenario)


def test_an_engine_that_dies_meanwhile_ends_what_is_held(run):
    async def scenario(trial):
        held = trial.submit(0), trial.submit(1)
        trial.client.dead = EngineDeadError("it is gone.")
        for submission in held:
            with pytest.raises(EngineDeadError, match="it is gone"):
                await ended(submission)
        with pytest.raises(EngineDeadError, match="it is gone"):
            trial.submit(2)
        assert trial.loop.num_unfinished == 0

    run(scenario)


def test_another_event_loop_finds_nothing_of_what_the_last_one_held(make_processor):
    trial = Trial(make_processor(None))

    async def forgotten():
        trial.submit(0)

    async def main():
        assert await ended(trial.submit(1)) == "length"
        assert trial.client.events == [("add", [1])]
        await trial.loop.close()

    asyncio.run(forgotten())
    asyncio.run(main())


def test_what_is_forgotten_before_it_went_is_not_known_to_the_engine(run):
    async def scenario(trial):
        first, second = trial.submit(0), trial.submit(1)
        del first
        gc.collect()
        time.sleep(0.03)  # as long as a collection may take
        assert await ended(second) == "length"
        assert trial.client.events == [("add", [1])]
        assert trial.loop.num_unfinished == 0

    run(scenario)


def test_a_drain_waits_for_what_is_held(run):
    async def scenario(trial):
        held = trial.submit(0), trial.submit(1)
        assert await trial.loop.drain(10)
        assert trial.client.events == [("add", [0, 1])]
        assert await asyncio.gather(*map(ended, held)) == ["length"] * 2
        with pytest.raises(EngineDrainingError):
            trial.submit(2)

    run(scenario)


def test_the_end_of_the_engine_ends_what_is_held(run):
    async def scenario(trial):
        held = trial.submit(0)
        await trial.loop.close()
        with pytest.raises(EngineClosedError):
            await ended(held)
        await asyncio.sleep(0.05)
        assert trial.client.events == []

    run(scenario)


def test_they_go_in_the_order_in_which_they_came_whatever_their_priority(run):
    """Order is the scheduler's affair, which has all of them before its step."""

    async def scenario(trial):
        held = [trial.submit(number, priority=-number) for number in range(9)]
        assert await asyncio.gather(*map(ended, held)) == ["length"] * 9
        assert trial.client.events == [("add", list(range(9)))]

    run(scenario)


class TestProcess:
    """Over an engine process."""

    @pytest.fixture
    def over_process(self, make_processor):
        def call(scenario, **limits):
            client = ProcessClient(Launch(messages.dumped(FakeBuilder(step_s=0.002, **limits))), EngineConfig())
            client.start()

            async def main():
                trial = Trial(make_processor(None))
                trial.client, trial.loop = client, AsyncRequestLoop(client, OutputProcessor(None))
                try:
                    await asyncio.wait_for(scenario(trial), 60)
                finally:
                    await trial.loop.close()

            asyncio.run(main())

        return call

    async def check(self, submission, seed, number, num_tokens=3):
        *_, last = [output async for output in submission]
        for index, answer in enumerate(last.outputs):
            assert answer.token_ids == fake_tokens([number], seed + index, num_tokens)

    def test_the_process_dies_while_requests_are_held(self, over_process):
        async def scenario(trial):
            held = [trial.submit(number, max_tokens=3, seed=1, n=1 + number % 2) for number in range(20)]
            os.kill(trial.client.pid, signal.SIGKILL)
            await asyncio.gather(*(self.check(one, 1, number) for number, one in enumerate(held)))
            assert trial.client.health.num_restarts == 1

        over_process(scenario)

    def test_ten_thousand_at_once_of_which_every_other_is_aborted(self, over_process):
        async def scenario(trial):
            submitted = [trial.submit(number % 250, max_tokens=3, seed=1) for number in range(10_000)]
            for one in submitted[1::2]:
                one.abort()
            kept = [self.check(one, 1, 2 * number % 250) for number, one in enumerate(submitted[::2])]
            await asyncio.gather(*kept)
            assert {await ended(one) for one in submitted[1::2]} == {"abort"}
            assert trial.loop.num_unfinished == (await trial.loop.call("stats")).num_unfinished == 0

        over_process(scenario)
