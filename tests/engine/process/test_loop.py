"""What the step loop takes in, in which order."""

from __future__ import annotations

import os

import pytest
import zmq

from llmkit.engine.process import messages
from llmkit.engine.process.loop import EngineLoop
from llmkit.engine.process.messages import Abort, AbortSequences, Add, Outputs, Stop
from llmkit.engine.process.plan_record import PlanRecorder, new_record_file
from llmkit.engine.process.pulse import Pulse
from llmkit.testing.fake_engine import FakeCore, FakeServedEngine, fake_tokens


class RecordingCore(FakeCore):
    """Notes what it is told, and ends the loop after some steps."""

    def __init__(self):
        super().__init__()
        self.added, self.aborted = [], []

    def add(self, request):
        self.added.append(request.request_id)
        super().add(request)

    def abort(self, request_ids):
        self.aborted += request_ids
        super().abort(request_ids)


class Trial:
    """A loop over sockets within this process."""

    def __init__(self, context, fd):
        self.core = RecordingCore()
        self._sockets = []
        self._to_child, inbox = self._pair(context, zmq.PUSH, zmq.PULL, "inproc://in")
        outbox, self._from_child = self._pair(context, zmq.PUSH, zmq.PULL, "inproc://out")
        engine = FakeServedEngine(self.core)
        self.loop = EngineLoop(engine, engine.run_utility, inbox, outbox, Pulse(), PlanRecorder(fd))

    def _pair(self, context, kind, other, endpoint):
        pair = context.socket(kind), context.socket(other)
        self._sockets += pair
        pair[0].bind(endpoint)
        pair[1].connect(endpoint)
        return pair

    def send(self, *sent):
        for message in sent:
            self._to_child.send(messages.encode(message))

    def received(self):
        found = []
        while self._from_child.poll(0):
            found.append(messages.decode_from_child(self._from_child.recv()))
        return found

    def close(self):
        for socket in self._sockets:
            socket.close(linger=0)


@pytest.fixture
def trial():
    fd = new_record_file()
    with zmq.Context() as context:
        trial = Trial(context, fd)
        yield trial
        trial.close()
    os.close(fd)


def test_what_was_aborted_before_it_was_taken_in_never_is(trial, request_of):
    many = [Add([request_of(f"r{i}")]) for i in range(300)]
    trial.send(*many, Abort([f"r{i}" for i in range(1, 300)]))
    trial.loop._take_in()
    assert trial.core.added == ["r0"]


def test_an_id_that_is_used_again_is_a_new_request(trial, request_of):
    trial.send(Add([request_of("a", 9)]), Abort(["a"]), Add([request_of("a", 2)]))
    trial.loop._take_in()
    trial.loop._step()
    trial.loop._step()
    tokens = [token for message in trial.received() for output in message.outputs for token in output.new_token_ids]
    assert tokens == fake_tokens((1, 2), 0, 2)
    assert not trial.core.has_work()


def test_a_sequence_may_be_aborted_right_after_its_request_came(trial, request_of):
    trial.send(Add([request_of("a", 3, n=2)]), AbortSequences([("a", 1)]))
    trial.loop._take_in()
    trial.loop._step()
    (message,) = trial.received()
    assert [output.index for output in message.outputs] == [0]


def test_outputs_say_what_was_seen_before_them_and_how_the_engine_is(trial, request_of):
    trial.send(Abort(["x"]), Add([request_of("a")]))
    trial.loop._take_in()
    trial.loop._step()
    (message,) = trial.received()
    assert isinstance(message, Outputs)
    assert message.seen == 2
    assert (message.summary.num_steps, message.summary.num_tokens, message.summary.num_running) == (1, 1, 1)


def test_a_step_that_raises_is_survived_but_not_for_ever(trial, request_of, monkeypatch):
    trial.send(Add([request_of("a", 50)]))
    trial.loop._take_in()
    with monkeypatch.context() as patch:
        patch.setattr(trial.core, "step", lambda: 1 / 0)
        trial.loop._step()
        trial.loop._step()
    trial.loop._step()  # this one works: the count begins anew
    monkeypatch.setattr(trial.core, "step", lambda: 1 / 0)
    trial.loop._step()
    trial.loop._step()
    with pytest.raises(ZeroDivisionError):
        trial.loop.run()


def test_a_stop_is_heard_before_the_next_step(trial, request_of):
    trial.send(Add([request_of("a")]), Stop())
    trial.loop.run()
    assert trial.core.num_steps == 0
