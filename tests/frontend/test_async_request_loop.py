"""What AsyncRequestLoop hands over and when, with a client that only notes it."""

from __future__ import annotations

import asyncio

import pytest

from llmkit.errors import EngineDeadError, RequestTimeoutError
from llmkit.frontend.async_request_loop import AsyncRequestLoop
from llmkit.frontend.output_processor import OutputProcessor
from llmkit.requests.message import EngineOutput
from llmkit.requests.sampling_params import SamplingParams


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

    def submit(self, number, **more):
        prompt = {"prompt_token_ids": [number]}
        return self.loop.submit(self._processor.prepare(prompt, SamplingParams(max_tokens=1, detokenize=False)), **more)


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
