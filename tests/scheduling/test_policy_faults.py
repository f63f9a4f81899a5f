"""A policy that fails again and again is left alone for a while; arrival order rules, and nothing is lost on return."""

from __future__ import annotations

import pytest

from llmkit.hookspecs.scheduler import Load
from llmkit.registry.breaker import Breaker
from llmkit.requests.message import EngineRequest
from llmkit.requests.request import RequestGroup
from llmkit.requests.sampling_params import SamplingParams
from llmkit.scheduling.guarded_queue import SLOW_CALL_S, GuardedQueue
from llmkit.testing.hostile_policy import HostilePolicy
from llmkit.testing.scheduling import SchedulingHarness
from llmkit_schedulers.fcfs import FcfsPolicy

LOAD = Load(1, 4, 1, 10, 10, 10)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class LastFirst(FcfsPolicy):
    """Works, and fails in `peek` on demand. calls: names of what it was asked."""

    def __init__(self):
        super().__init__()
        self.failing = False
        self.calls = []

    def key(self, request):
        return -request.sequence_number

    def add(self, request):
        self.calls.append("add")
        super().add(request)

    def remove(self, request):
        self.calls.append("remove")
        super().remove(request)

    def peek(self):
        self.calls.append("peek")
        if self.failing:
            raise RuntimeError("not now")
        return super().peek()


def make_requests(count, first=0):
    params = SamplingParams(seed=0)
    return [
        RequestGroup(
            EngineRequest(request_id=f"r{i}", prompt_token_ids=[1], sampling_params=params, max_tokens=4), i, 5
        ).leader
        for i in range(first, first + count)
    ]


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def queue(clock):
    breaker = Breaker("scheduler", "last-first", limit=3, window_s=60, pause_s=30, clock=clock)
    return GuardedQueue(LastFirst(), breaker=breaker, clock=clock)


def fail(queue, times=3):
    queue._policy.failing = True
    for _ in range(times):
        queue.peek()
    queue._policy.failing = False


def drain(queue):
    order = []
    while (request := queue.peek()) is not None:
        queue.pop(request)
        order.append(request)
    return order


def test_while_the_breaker_is_open_arrival_order_rules_and_the_policy_is_not_asked(queue):
    requests = make_requests(3)
    for request in requests:
        queue.add(request)
    fail(queue)
    queue._policy.calls.clear()
    queue.requeue(requests[0])
    assert queue.victim(requests, requests[0]) is requests[-1]
    assert queue.admit(requests[0], LOAD)
    assert queue.chunk(requests[0], 7) == 7
    assert drain(queue) == requests
    assert queue._policy.calls == []
    assert queue.num_faults == 3


def test_when_it_is_asked_again_it_has_been_told_what_it_missed(queue, clock):
    first = make_requests(4)
    for request in first:
        queue.add(request)
    fail(queue)
    later = make_requests(2, first=4)
    queue.pop(first[0])  # entered
    queue.remove(first[1])  # aborted
    for request in later:
        queue.add(request)
    queue.requeue(first[0])  # preempted: waits again
    clock.now += 30
    expected = [later[1], later[0], first[3], first[2], first[0]]
    assert drain(queue) == expected, "its own order again, of exactly those that wait"
    assert queue.num_faults == 3
    assert len(queue._policy) == 0


def test_a_policy_that_fails_while_it_is_told_what_it_missed_loses_nothing(queue, clock):
    requests = make_requests(5)
    for request in requests[:2]:
        queue.add(request)
    fail(queue)
    for request in requests[2:]:
        queue.add(request)
    honest, left = queue._policy.add, [1]

    def add(request):
        if not left:
            raise RuntimeError("once more")
        left.pop()
        honest(request)

    queue._policy.add = add
    clock.now += 30
    assert queue.peek() is requests[0], "arrival order: the breaker is open again"
    queue._policy.add = honest
    clock.now += 60
    assert set(drain(queue)) == set(requests)


def test_a_call_that_takes_too_long_is_a_fault(queue, clock):
    requests = make_requests(2)
    for request in requests:
        queue.add(request)

    def slow(request, load):  # noqa: ARG001
        clock.now += SLOW_CALL_S + 0.5
        return True

    queue._policy.admit = slow
    for _ in range(5):
        assert queue.admit(requests[0], LOAD)
    assert queue.num_faults == 3, "then it is not asked any more"
    assert queue.breaker.last_fault == "admit() took 1.5 s"
    assert queue.breaker.open


def test_a_fault_is_counted_once(queue):
    queue.add(make_requests(1)[0])
    fail(queue, 1)
    assert queue.num_faults == 1
    assert queue.breaker.last_fault == "peek() raised RuntimeError: not now"


@pytest.mark.parametrize("seed", range(6))
def test_with_a_hostile_policy_every_request_is_answered_and_the_faults_are_shown(seed):
    run = SchedulingHarness(HostilePolicy(seed), num_blocks=16, max_num_seqs=3)
    for number in range(12):
        run.add(f"r{number}", [number % 3] * (1 + number), 6)
    run.run()
    run.check_answers()
    (count,) = run.core.stats().plugin_faults.values()
    assert count.state == "open"
    assert count.num_faults == run.core.stats().num_policy_faults >= 5
    assert count.last_fault
