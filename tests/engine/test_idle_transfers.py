"""An engine without requests goes on with what its connector moves."""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import zmq

from llmkit.engine.idle_transfers import LONGEST_WAIT_S, IdleTransfers
from llmkit.engine.process import messages
from llmkit.engine.process.loop import EngineLoop
from llmkit.engine.process.messages import Add, Stop
from llmkit.engine.process.plan_record import PlanRecorder, new_record_file
from llmkit.engine.process.pulse import Pulse
from llmkit.engine.thread_client import ThreadClient
from llmkit.requests.message import EngineRequest
from llmkit.requests.sampling_params import SamplingParams
from llmkit.testing.memory_connector import MemoryConnector, MemoryStore
from llmkit.testing.scheduling import SchedulingHarness
from llmkit_schedulers.fcfs import FcfsPolicy


class Core:
    """Has transfers until they were stepped so often; `brings` says what each step answers."""

    def __init__(self, *brings):
        self.brings = list(brings)

    def has_transfers(self):
        return bool(self.brings)

    def step_transfers(self):
        outcome = self.brings.pop(0)
        if outcome is None:
            raise RuntimeError("a step that is broken off")
        return outcome


def waits(core):
    """Run all steps; the wait before each, in milliseconds."""
    now = 0.0
    idle = IdleTransfers(core, clock=lambda: now)
    found = []
    while (seconds := idle.seconds_left()) is not None:
        found.append(round(1000 * seconds))
        now += seconds
        idle.run()
    return found


def test_without_transfers_nobody_is_woken():
    core = Core()
    idle = IdleTransfers(core)
    assert idle.seconds_left() is None
    idle.run()


def test_steps_that_bring_something_follow_at_once_others_ever_later():
    assert waits(Core(True, True, True)) == [0, 0, 0]
    assert waits(Core(False, False, False, True, False, False)) == [0, 2, 4, 8, 0, 2]
    long = waits(Core(*[False] * 20))
    assert long[-1] == 1000 * LONGEST_WAIT_S
    assert all(later <= 2 * sum(long[: i + 1]) for i, later in enumerate(long[2:], 1))


def test_a_step_that_is_broken_off_ends_nothing(caplog):
    assert waits(Core(None, True, None, None, True)) == [0, 2, 0, 2, 4]
    assert "a step that is broken off" in caplog.text


def request(name, num_prompt_tokens=28):
    return EngineRequest(
        request_id=name,
        prompt_token_ids=list(range(num_prompt_tokens)),
        sampling_params=SamplingParams(seed=0, max_tokens=2),
        max_tokens=2,
    )


def storing_core(store, delay):
    """Of an engine whose connector stores every block, and needs `delay` reports for it."""
    return SchedulingHarness(FcfsPolicy(), connector=MemoryConnector(store, delay=delay)).core


@pytest.mark.parametrize("delay", [0, 7])
def test_the_engine_in_a_thread_stores_while_nobody_asks(delay):
    """Without another request, and without a call that would wake it."""
    store = MemoryStore()
    core = storing_core(store, delay)

    async def main():
        client = ThreadClient(lambda: SimpleNamespace(core=core, close=core.close))
        client.add([request("a")])
        while not any(output.finish_reason for output in await client.outputs()):
            pass
        while core.has_transfers() or store.num_saved < 7:
            await asyncio.sleep(0.001)
        before = core.stats()
        await client.close()
        return before

    stats = asyncio.run(asyncio.wait_for(main(), 30))
    assert store.num_saved == 7
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize("delay", [1, 7])
def test_the_loop_of_the_engine_process_stores_while_no_message_comes(delay):
    store = MemoryStore()
    core = storing_core(store, delay)
    fd = new_record_file()
    with zmq.Context() as context, ExitStack() as stack:
        kinds = (zmq.PUSH, zmq.PULL, zmq.PUSH, zmq.PULL)
        parent, inbox, outbox, outputs = (stack.enter_context(context.socket(kind)) for kind in kinds)
        for bound, other, name in ((parent, inbox, "inproc://in"), (outbox, outputs, "inproc://out")):
            bound.bind(name)
            other.connect(name)
        loop = EngineLoop(SimpleNamespace(core=core), None, inbox, outbox, Pulse(), PlanRecorder(fd))
        step_transfers = core.step_transfers
        steps = []

        def step():
            steps.append(step_transfers())
            if not core.has_transfers():
                parent.send(messages.encode(Stop()))
            return steps[-1]

        core.step_transfers = step
        parent.send(messages.encode(Add([request("a")])))
        loop.run()
    os.close(fd)
    core.close()
    assert steps
    assert store.num_saved == 7
    assert not core.scheduler.transfers.holds_blocks


def test_an_aborted_load_gives_back_its_blocks_while_nobody_asks():
    store = MemoryStore()
    core = storing_core(store, 0)
    core.add(request("a"))
    while core.has_work():
        core.step()
    core.settle_transfers(5.0)
    core.close()
    run = SchedulingHarness(FcfsPolicy(), connector=MemoryConnector(store, asynchronous=True, delay=5))
    run.add("b", list(range(28)))
    run.step()
    run.core.abort(["b"])
    assert not run.core.has_work()
    assert run.core.stats().num_free_blocks < run.core.stats().num_blocks
    waited = waits(run.core)
    assert len(waited) >= 5
    assert run.core.stats().num_free_blocks == run.core.stats().num_blocks
