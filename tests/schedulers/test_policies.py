from __future__ import annotations

from dataclasses import dataclass

import pytest
from pydantic import ValidationError

from llmkit.testing.scheduling import SchedulingHarness, check_policy
from llmkit_schedulers import fcfs, priority


@dataclass(eq=False)
class Waiting:
    sequence_number: int
    priority: int = 0
    arrival_time: float = 0.0


def build(front_door, **options):
    model = front_door.info.options
    hook = front_door.llmkit_scheduler_policy
    return hook(options=model(**options)) if model else hook()


def drain(policy):
    order = []
    while (view := policy.peek()) is not None:
        assert policy.pop() is view
        order.append(view.sequence_number)
    assert len(policy) == 0
    return order


@pytest.mark.parametrize("make", [lambda: build(fcfs), lambda: build(priority), lambda: build(priority, aging_s=2)])
class TestEvery:
    def test_conforms(self, make):
        check_policy(make)

    def test_empty(self, make):
        policy = make()
        assert policy.peek() is None
        with pytest.raises(IndexError):
            policy.pop()

    def test_removed_requests_never_come_up(self, make):
        policy = make()
        views = [Waiting(i) for i in range(100)]
        for view in views:
            policy.add(view)
        for view in views[:50]:
            policy.remove(view)
            policy.remove(view)
        policy.add(views[7])
        assert len(policy) == 51
        assert drain(policy) == [7, *range(50, 100)]

    def test_removed_requests_do_not_pile_up(self, make):
        policy = make()
        policy.add(Waiting(0))
        for i in range(1, 1000):
            view = Waiting(i)
            policy.add(view)
            policy.remove(view)
        assert len(policy._heap) < 50


class TestFcfs:
    def test_preempted_requests_come_before_younger_ones(self):
        policy = build(fcfs)
        views = [Waiting(i) for i in range(4)]
        for view in views:
            policy.add(view)
        first = policy.pop()
        policy.requeue(first)
        assert drain(policy) == [0, 1, 2, 3]

    def test_the_youngest_yields(self):
        views = [Waiting(2), Waiting(0), Waiting(1)]
        assert build(fcfs).victim(views, views[1]) is views[0]


class TestPriority:
    def test_lower_is_sooner_then_arrival(self):
        policy = build(priority)
        for view in (Waiting(0, 5), Waiting(1, -1), Waiting(2, 5), Waiting(3, 0)):
            policy.add(view)
        assert drain(policy) == [1, 3, 0, 2]

    def test_without_aging_time_does_not_matter(self):
        policy = build(priority)
        policy.add(Waiting(0, 1, arrival_time=0.0))
        policy.add(Waiting(1, 0, arrival_time=1e6))
        assert drain(policy) == [1, 0]

    def test_waiting_for_aging_s_is_worth_one_level(self):
        policy = build(priority, aging_s=10)
        policy.add(Waiting(0, 1, arrival_time=100.0))
        policy.add(Waiting(1, 0, arrival_time=109.0))
        policy.add(Waiting(2, 0, arrival_time=111.0))
        assert drain(policy) == [1, 0, 2]

    def test_the_least_urgent_yields(self):
        views = [Waiting(0, 3), Waiting(1, 0), Waiting(2, 3), Waiting(3, 1)]
        assert build(priority).victim(views, views[1]) is views[2]

    @pytest.mark.parametrize("aging_s", [0, -1, float("inf"), float("nan"), "slow"])
    def test_bad_options(self, aging_s):
        with pytest.raises(ValidationError):
            priority.PriorityOptions(aging_s=aging_s)
        with pytest.raises(ValidationError):
            priority.PriorityOptions(ageing_s=1)

    def test_an_urgent_request_enters_first(self):
        run = SchedulingHarness(build(priority), max_num_seqs=1)
        run.add("running", [1], 3, priority=5)
        run.step()
        run.add("later", [2], 3, priority=5)
        run.add("urgent", [3], 3, priority=-5)
        run.run()
        assert [request.request_id for request in run.finished] == ["running", "urgent", "later"]
