from __future__ import annotations

import logging

import numpy as np
import pytest

from llmkit.hookspecs.scheduler import Load
from llmkit.requests.message import EngineRequest
from llmkit.requests.request import RequestGroup
from llmkit.requests.sampling_params import SamplingParams
from llmkit.scheduling.guarded_queue import GuardedQueue
from llmkit.testing.hostile_policy import HostilePolicy
from llmkit_schedulers.fcfs import FcfsPolicy

LOAD = Load(1, 4, 1, 10, 10, 10)


def make_requests(count):
    params = SamplingParams(seed=0)
    return [
        RequestGroup(
            EngineRequest(request_id=f"r{i}", prompt_token_ids=[1], sampling_params=params, max_tokens=4), i, 5
        ).leader
        for i in range(count)
    ]


def filled(policy, count=3):
    queue = GuardedQueue(policy)
    requests = make_requests(count)
    for request in requests:
        queue.add(request)
    return queue, requests


def drain(queue):
    order = []
    while (request := queue.peek()) is not None:
        queue.pop(request)
        order.append(request)
    return order


def test_an_honest_policy_is_followed():
    class LastFirst(FcfsPolicy):
        def key(self, request):
            return -request.sequence_number

    queue, requests = filled(LastFirst())
    queue.remove(requests[1])
    assert drain(queue) == [requests[2], requests[0]]
    assert queue.num_faults == 0


@pytest.mark.parametrize("seed", range(20))
def test_a_hostile_policy_loses_nothing(seed):
    queue, requests = filled(HostilePolicy(seed), 10)
    queue.remove(requests[3])
    queue.requeue(requests[3])
    assert len(queue) == 10
    assert sorted(request.sequence_number for request in drain(queue)) == list(range(10))
    assert len(queue) == 0
    assert queue.num_faults > 0


def test_a_forgotten_request_is_served_in_the_order_of_arrival():
    class Forgetful(FcfsPolicy):
        def add(self, request):
            if request.sequence_number == 1:
                super().add(request)

    queue, requests = filled(Forgetful())
    assert drain(queue) == [requests[1], requests[0], requests[2]]


def test_a_request_returned_by_pop_instead_of_another_is_put_back():
    class Confused(FcfsPolicy):
        def pop(self):
            first, second = super().pop(), super().pop()
            self.add(first)
            return second

    queue, requests = filled(Confused(), 2)
    queue.pop(queue.peek())
    assert queue.num_faults == 1
    assert requests[1] in queue
    assert queue.peek() is requests[1]


@pytest.mark.parametrize("answer", [None, "no", 0, []])
def test_who_forgets_to_say_whether_to_admit_keeps_nobody_out(answer):
    class Silent(FcfsPolicy):
        def admit(self, request, load):  # noqa: ARG002
            return answer

    queue, requests = filled(Silent())
    assert queue.admit(requests[0], LOAD)
    assert queue.breaker.num_faults == 1
    assert "neither True nor False" in queue.breaker.last_fault


@pytest.mark.parametrize("answer", [True, False, np.True_, np.False_])
def test_admission_is_as_the_policy_says(answer):
    class Deciding(FcfsPolicy):
        def admit(self, request, load):  # noqa: ARG002
            return answer

    queue, requests = filled(Deciding())
    assert queue.admit(requests[0], LOAD) is bool(answer)
    assert not queue.breaker.num_faults


def test_a_fault_is_logged_once_and_counted_always(caplog):
    class Failing(FcfsPolicy):
        def admit(self, request, load):  # noqa: ARG002
            raise ValueError("no")

    queue, requests = filled(Failing())
    with caplog.at_level(logging.WARNING):
        assert all(queue.admit(requests[0], LOAD) for _ in range(4))
    assert queue.num_faults == 4
    assert len(caplog.records) == 1
    assert "Failing is at fault: admit() raised ValueError: no" in caplog.text


@pytest.mark.parametrize(("answer", "taken"), [(3, 3), (0, 1), (-7, 1), (9, 8), ("x", 8), (None, 8), (2.9, 2)])
def test_chunks_are_clipped(answer, taken):
    class Chunking(FcfsPolicy):
        def chunk(self, request, offered):  # noqa: ARG002
            return answer

    queue, requests = filled(Chunking())
    assert queue.chunk(requests[0], 8) == taken


@pytest.mark.parametrize("answer", [None, 5, "stranger", "raise"])
def test_without_a_usable_victim_the_last_one_yields(answer):
    stranger = make_requests(1)[0]

    class Choosing(FcfsPolicy):
        def victim(self, running, needing):  # noqa: ARG002
            if answer == "raise":
                raise KeyError(1)
            return stranger.view if answer == "stranger" else answer

    queue = GuardedQueue(Choosing())
    running = make_requests(3)
    assert queue.victim(running, running[0]) is running[2]
    assert queue.num_faults == (answer is not None)


class _Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError

    __repr__ = __str__


def _raises():
    raise _Unspeakable


@pytest.mark.parametrize("answer", [lambda: 10**5000, _Unspeakable, _raises])
@pytest.mark.parametrize("method", ["peek", "pop", "victim", "chunk"])
def test_faults_that_cannot_be_put_into_words(method, answer):
    queue, requests = filled(policy := FcfsPolicy())
    setattr(policy, method, lambda *_: answer())
    assert queue.victim(requests, requests[0]) is requests[-1]
    assert 1 <= queue.chunk(requests[0], 5) <= 5
    assert set(drain(queue)) == set(requests)
    assert queue.num_faults
