from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError

from llmkit.hookspecs.scheduler import Load
from llmkit.testing.scheduling import SchedulingHarness, check_policy
from llmkit.testing.waiting_requests import FakeRequestView as Waiting
from llmkit.testing.waiting_requests import drain
from llmkit_schedulers import classic, fair, fcfs, priority, srtf


def build(front_door, **options):
    model = front_door.info.options
    hook = front_door.llmkit_scheduler_policy
    return hook(options=model(**options)) if model else hook()


def numbers(policy):
    return [view.sequence_number for view in drain(policy)]


MAKERS = {
    "fcfs": lambda: build(fcfs),
    "priority": lambda: build(priority),
    "priority, aging": lambda: build(priority, aging_s=2),
    "fair": lambda: build(fair),
    "classic": lambda: build(classic),
    "srtf": lambda: build(srtf),
}


def count_objects(policy):
    """Elements of all containers that a policy holds, at any depth."""
    seen, todo, count = set(), [policy], 0
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, (Waiting, str, BaseModel)):
            continue
        seen.add(id(one))
        if isinstance(one, dict):
            todo += [*one, *one.values()]
        elif isinstance(one, (list, tuple, set, frozenset)):
            todo += one
        else:
            names = [*getattr(one, "__dict__", {}), *getattr(type(one), "__slots__", ())]
            todo += [getattr(one, name) for name in names]
        count += len(one) if hasattr(one, "__len__") else 0
    return count


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
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
        assert numbers(policy) == [7, *range(50, 100)]

    def test_removed_requests_do_not_pile_up(self, make):
        policy = make()
        policy.add(Waiting(0))
        for i in range(1, 1000):
            view = Waiting(i)
            policy.add(view)
            policy.remove(view)
        assert count_objects(policy) < 200


class TestFcfs:
    def test_preempted_requests_come_before_younger_ones(self):
        policy = build(fcfs)
        views = [Waiting(i) for i in range(4)]
        for view in views:
            policy.add(view)
        first = policy.pop()
        policy.requeue(first)
        assert numbers(policy) == [0, 1, 2, 3]

    def test_the_youngest_yields(self):
        views = [Waiting(2), Waiting(0), Waiting(1)]
        assert build(fcfs).victim(views, views[1]) is views[0]


class TestPriority:
    def test_lower_is_sooner_then_arrival(self):
        policy = build(priority)
        for view in (Waiting(0, 5), Waiting(1, -1), Waiting(2, 5), Waiting(3, 0)):
            policy.add(view)
        assert numbers(policy) == [1, 3, 0, 2]

    def test_without_aging_time_does_not_matter(self):
        policy = build(priority)
        policy.add(Waiting(0, 1, arrival_time=0.0))
        policy.add(Waiting(1, 0, arrival_time=1e6))
        assert numbers(policy) == [1, 0]

    def test_waiting_for_aging_s_is_worth_one_level(self):
        policy = build(priority, aging_s=10)
        policy.add(Waiting(0, 1, arrival_time=100.0))
        policy.add(Waiting(1, 0, arrival_time=109.0))
        policy.add(Waiting(2, 0, arrival_time=111.0))
        assert numbers(policy) == [1, 0, 2]

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


class TestClassic:
    def test_who_was_running_comes_before_who_waits(self):
        policy = build(classic)
        views = [Waiting(i) for i in range(4)]
        for view in views:
            policy.add(view)
        first, second = policy.pop(), policy.pop()
        policy.requeue(second)
        policy.requeue(first)
        assert numbers(policy) == [0, 1, 2, 3]

    def test_the_watermark_keeps_blocks_free(self):
        policy = build(classic, watermark=0.1)
        assert policy.admit(Waiting(0), Load(1, 4, 1, 10, 10, 100))
        assert not policy.admit(Waiting(0), Load(1, 4, 1, 10, 9, 100))

    def test_victims_are_swapped_and_come_back_before_others_enter(self):
        entered = []
        run = SchedulingHarness(
            build(classic),
            num_blocks=8,
            num_host_blocks=30,
            before_step=lambda plan: entered.extend(row.request.request_id for row in plan.added),
        )
        for i in range(5):
            run.add(f"r{i}", [i] * 6, 14)
        run.run()
        run.check_answers()
        stats = run.core.stats()
        assert stats.num_swaps > 0
        assert stats.num_swaps_missed == 0
        assert run.executor.num_tokens_computed == 5 * (6 + 13)
        assert len(entered) == 5 + stats.num_swaps
        assert entered[:3] == ["r0", "r1", "r2"]

    def test_prompts_come_first_in_steps_of_their_own(self):
        plans = []
        run = SchedulingHarness(build(classic), max_num_batched_tokens=6, before_step=plans.append)
        run.add("a", [1] * 4, 5)
        run.step()
        run.add("b", [2] * 9, 4)
        run.run()
        assert [plan.num_new.tolist() for plan in plans[:5]] == [[4], [6], [3], [1, 1], [1, 1]]


class TestSrtf:
    def test_the_shortest_answer_comes_first(self):
        policy = build(srtf)
        for view in (Waiting(0, max_tokens=30), Waiting(1, max_tokens=10), Waiting(2, max_tokens=20)):
            policy.add(view)
        assert numbers(policy) == [1, 2, 0]

    def test_a_hint_counts_but_not_beyond_max_tokens(self):
        policy = build(srtf)
        policy.add(Waiting(0, max_tokens=30))
        policy.add(Waiting(1, max_tokens=100, extra_args={"expected_tokens": 5}))
        policy.add(Waiting(2, max_tokens=20, extra_args={"expected_tokens": 1000}))
        assert numbers(policy) == [1, 2, 0]

    def test_the_hint_may_have_another_name(self):
        policy = build(srtf, hint="length")
        policy.add(Waiting(0, max_tokens=30, extra_args={"expected_tokens": 1}))
        policy.add(Waiting(1, max_tokens=100, extra_args={"length": 5}))
        assert numbers(policy) == [1, 0]

    @pytest.mark.parametrize("hint", [-1, True, "5", None, float("nan"), float("inf"), [5], 10**400])
    def test_a_bad_hint_is_no_hint(self, hint):
        assert build(srtf).remaining(Waiting(0, max_tokens=30, extra_args={"expected_tokens": hint})) == 30

    def test_what_it_has_got_counts(self):
        policy = build(srtf)
        policy.add(Waiting(0, max_tokens=20))
        policy.requeue(Waiting(1, max_tokens=30, num_output_tokens=25))
        assert numbers(policy) == [1, 0]
        assert policy.remaining(Waiting(2, max_tokens=3, num_output_tokens=9)) == 1

    def test_the_longest_yields(self):
        views = [Waiting(0, max_tokens=5), Waiting(1, max_tokens=50), Waiting(2, max_tokens=50, num_output_tokens=10)]
        assert build(srtf).victim(views, views[0]) is views[1]

    def test_nobody_is_overtaken_for_longer_than_the_claim(self):
        policy = build(srtf, aging_tokens_per_s=10, longest_tokens=100)
        assert policy.starvation_bound_s == 10
        policy.add(Waiting(0, max_tokens=10**6))
        for i in range(1, 40):
            policy.add(Waiting(i, max_tokens=1, arrival_time=float(i)))
        order = numbers(policy)
        assert order == [*range(1, 10), 0, *range(10, 40)]

    @pytest.mark.parametrize(
        "options",
        [{"aging_tokens_per_s": 0}, {"aging_tokens_per_s": float("inf")}, {"longest_tokens": 0}, {"hint": ""}],
    )
    def test_bad_options(self, options):
        with pytest.raises(ValidationError):
            srtf.SrtfOptions(**options)
