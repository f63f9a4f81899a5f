"""Requests on their way to an engine: which go together, and that none is held without a reason."""

from __future__ import annotations

import asyncio

import pytest

from llmkit.errors import EngineDeadError
from llmkit.frontend.hand_over import LONGEST_S, QUIET_TURNS, HandOver
from llmkit.requests.message import EngineRequest
from llmkit.requests.sampling_params import SamplingParams


def request(name):
    return EngineRequest(request_id=name, prompt_token_ids=[1], sampling_params=SamplingParams(), max_tokens=1)


class Way:
    """A HandOver with a clock that stands still unless it is told to go on."""

    def __init__(self):
        self.batches = []
        self.failures = []
        self.error = None
        self.now = 0.0
        self.hand_over = HandOver(self.add, self.failures.append, lambda: self.now)

    def add(self, requests):
        if self.error is not None:
            raise self.error
        self.batches.append([request.request_id for request in requests])

    def take(self, *names, resting=True):
        for name in names:
            self.hand_over.take(request(name), resting=resting)

    async def turns(self, count):
        for _ in range(count):
            await asyncio.sleep(0)


def run(scenario):
    asyncio.run(scenario(Way()))


def test_one_that_comes_alone_goes_after_some_turns_whatever_the_clock_says():
    async def scenario(way):
        way.take("a")
        await way.turns(QUIET_TURNS + 1)
        assert way.batches == [["a"]]
        assert len(way.hand_over) == 0

    run(scenario)


def test_what_comes_turn_after_turn_goes_together():
    async def scenario(way):
        for name in "abcd":
            way.take(name)
            await way.turns(1)
        assert way.batches == []
        await way.turns(QUIET_TURNS)
        assert way.batches == [list("abcd")]

    run(scenario)


def test_requests_whose_bytes_are_still_in_sockets_are_waited_for():
    """What a loop finds readable in the next turn makes tasks, which bring their requests in the one after it."""

    async def scenario(way):
        loop = asyncio.get_running_loop()
        way.take("a")
        loop.call_soon(lambda: loop.create_task(bring(way, "b")))
        await way.turns(QUIET_TURNS + 3)
        assert way.batches == [["a", "b"]]

    async def bring(way, name):
        way.take(name)

    run(scenario)


def test_nothing_is_held_for_longer_than_the_limit_however_many_come():
    async def scenario(way):
        for number in range(10):
            way.take(str(number))
            way.now += LONGEST_S / 4
            await way.turns(1)
        first, *_ = way.batches
        assert first == [str(number) for number in range(len(first))]
        assert 4 <= len(first) <= 5

    run(scenario)


def test_a_busy_engine_gets_each_at_once():
    async def scenario(way):
        way.take("a", "b", resting=False)
        assert way.batches == [["a"], ["b"]]

    run(scenario)


def test_what_is_withdrawn_never_goes():
    async def scenario(way):
        way.take("a", "b")
        assert way.hand_over.withdraw(["b", "c"]) == ["c"]
        await way.turns(QUIET_TURNS + 1)
        way.take("d")
        way.hand_over.withdraw(["d"])
        await way.turns(QUIET_TURNS + 1)
        way.take("e")
        await way.turns(QUIET_TURNS + 1)
        assert way.batches == [["a"], ["e"]]

    run(scenario)


def test_whoever_cannot_wait_has_all_of_them_go_now():
    async def scenario(way):
        way.take("a", "b")
        way.hand_over.flush()
        assert way.batches == [["a", "b"]]
        await way.turns(QUIET_TURNS + 1)
        assert way.batches == [["a", "b"]]

    run(scenario)


@pytest.mark.parametrize("resting", [True, False])
def test_an_engine_that_is_gone_is_told_to_whoever_can_know(resting):
    async def scenario(way):
        way.error = EngineDeadError("gone")
        if resting:
            way.take("a")
            await way.turns(QUIET_TURNS + 1)
            assert [error.message for error in way.failures] == ["gone"]
        else:
            with pytest.raises(EngineDeadError, match="gone"):
                way.take("a", resting=False)

    run(scenario)
