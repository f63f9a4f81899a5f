"""What is asked of a scheduling policy: a queue that loses nothing, answers within the contract whatever the requests
are like, the same order for the same history, requests that come back after a preemption, and the bound on waiting
that it claims."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from time import process_time
from typing import Any

import pytest

from llmkit.hookspecs.scheduler import Load, RequestView, SchedulerPolicy
from llmkit.scheduling.plan import StepPlan
from llmkit.testing.conformance.target import Conformance
from llmkit.testing.scheduling import SchedulingHarness, check_policy
from llmkit.testing.service import LONGEST_ANSWER, LONGEST_PROMPT, ServiceRun
from llmkit.testing.waiting_requests import FakeRequestView, drain

MANY = 10_000
CPU_SECONDS = 5.0
"""For `MANY` requests to be added and taken out: half a millisecond each."""

KEPT = 20
"""Requests out of 60, in three turns, that a policy may still hold on to at the end: as many as one turn has."""

_STRANGE: tuple[Any, ...] = (
    "",
    "x" * 1000,
    -1,
    True,
    None,
    float("nan"),
    float("inf"),
    10**400,
    [],
    {"a": 1},
    object(),
)


class _AnswersEverything(Mapping[str, Any]):
    """Extra arguments with the same strange value under every key."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getitem__(self, key: str) -> Any:
        return self._value

    def __iter__(self) -> Iterator[str]:
        return iter(("key",))

    def __len__(self) -> int:
        return 1

    def __contains__(self, key: object) -> bool:
        return True


def ordinary(count: int, seed: int = 0) -> list[FakeRequestView]:
    """Requests of several users, priorities and lengths, in the order of arrival."""
    draw = random.Random(seed)
    return [
        FakeRequestView(
            number,
            priority=draw.randint(-2, 2),
            arrival_time=number * 0.1,
            user=draw.choice([None, "a", "b", "c"]),
            num_prompt_tokens=draw.randint(1, 500),
            max_tokens=draw.randint(0, 500),
        )
        for number in range(count)
    ]


def strange() -> list[FakeRequestView]:
    """Requests at the limits of what gets through the door, and beyond."""
    views = [FakeRequestView(number, extra_args=_AnswersEverything(value)) for number, value in enumerate(_STRANGE)]
    fields: list[dict[str, Any]] = [
        {"priority": 2**31 - 1},
        {"priority": -(2**31)},
        {"user": ""},
        {"user": "\ud800\x00" * 200},
        {"max_tokens": 0, "num_prompt_tokens": 1},
        {"max_tokens": 2**31 - 1, "num_prompt_tokens": 2**31 - 1},
        {"num_output_tokens": 10**9, "max_tokens": 5},
        {"arrival_time": 0.0},
        {"arrival_time": 1e18},
        {"index": 10_000},
        {"num_preemptions": 10**6, "num_computed_tokens": 10**6},
    ]
    return views + [FakeRequestView(len(views) + i, **values) for i, values in enumerate(fields)]


@pytest.fixture
def policy(conformance: Conformance) -> SchedulerPolicy:
    made: SchedulerPolicy = conformance.create()
    return made


def test_random_load_is_answered_right(conformance: Conformance) -> None:
    """Under random load in a tiny cache nothing is lost, the budget holds, and the core never has to step in."""
    check_policy(conformance.create)


def test_attributes_are_what_the_core_knows(policy: SchedulerPolicy) -> None:
    assert policy.preemption in ("recompute", "swap")
    assert isinstance(policy.mixes_prefill_and_decode, bool)
    bound = policy.starvation_bound_s
    assert bound is None or (isfinite(bound) and bound >= 0), f"starvation_bound_s is {bound!r}"


def test_an_empty_queue(policy: SchedulerPolicy) -> None:
    assert (policy.peek(), len(policy)) == (None, 0), "a new policy is not empty"
    with pytest.raises(IndexError):
        policy.pop()
    policy.remove(FakeRequestView(0))
    assert (policy.peek(), len(policy)) == (None, 0), "after the removal of a request that never waited it is not empty"


@pytest.mark.parametrize("make", [lambda: ordinary(200), strange], ids=["ordinary", "strange"])
def test_every_request_comes_up_once(policy: SchedulerPolicy, make: Callable[[], list[FakeRequestView]]) -> None:
    views = make()
    for number, view in enumerate(views):
        policy.add(view)
        assert len(policy) == number + 1, f"len() is {len(policy)} with {number + 1} waiting"
        first = policy.peek()
        assert first in views[: number + 1], "peek() returned a request that does not wait"
        assert policy.peek() is first, "peek() changes something"
    assert sorted(view.sequence_number for view in drain(policy)) == list(range(len(views)))


def test_removed_requests_do_not_come_up_unless_they_are_added_again(policy: SchedulerPolicy) -> None:
    views = ordinary(60)
    for view in views:
        policy.add(view)
    for view in views[::3]:
        policy.remove(view)
        policy.remove(view)
    policy.add(views[3])
    expected = {view for view in views if view.sequence_number % 3} | {views[3]}
    order = drain(policy)
    assert set(order) >= expected, "requests were lost with others that were removed"
    assert len(order) == len(expected), "requests that were removed came up, or one twice"


def test_a_request_that_was_preempted_waits_again(policy: SchedulerPolicy) -> None:
    views = ordinary(30)
    for view in views:
        policy.add(view)
    running = [policy.pop() for _ in range(10)]
    for again in running[:5]:
        assert isinstance(again, FakeRequestView)
        again.num_preemptions, again.num_output_tokens, again.num_computed_tokens = 1, 3, 2
        policy.requeue(again)
    policy.remove(running[0])
    order = drain(policy)
    assert set(order) >= {*views} - {running[0], *running[5:]}, "a request that was requeued, or that waited, is lost"
    assert len(order) == 24, "a request that runs, or was removed after it was requeued, came up"


def test_policies_have_nothing_in_common(conformance: Conformance) -> None:
    """Two engines in one process have a policy each."""
    one, other = conformance.create(), conformance.create()
    one.add(FakeRequestView(0))
    assert (other.peek(), len(other)) == (None, 0), "a request that was added to one policy waits in another one"


def test_requests_that_have_gone_are_let_go(policy: SchedulerPolicy) -> None:
    """A view has the whole request behind it; nobody tells a policy of its end, so what is kept of requests that run
    must not keep them alive."""
    alive: weakref.WeakSet[FakeRequestView] = weakref.WeakSet()

    def serve(first: int) -> None:
        for number in range(first, first + 20):
            view = FakeRequestView(number, user="abc"[number % 3], num_prompt_tokens=1 + number % 7)
            alive.add(view)
            policy.add(view)
        while policy.peek() is not None:
            entered = policy.pop()
            policy.served([entered], [entered.num_prompt_tokens], [1])

    for first in (0, 20, 40):
        serve(first)
    gc.collect()
    assert len(alive) <= KEPT, f"{len(alive)} of 60 requests that have been taken out are still referred to"


@pytest.mark.parametrize("make", [lambda: ordinary(20), strange], ids=["ordinary", "strange"])
def test_answers_keep_to_the_contract(policy: SchedulerPolicy, make: Callable[[], list[FakeRequestView]]) -> None:
    """The core would replace others, and count them as faults."""
    views: list[RequestView] = list(make())
    for view in views:
        for running in ([view], views, [view, *views[:3]]):
            victim = policy.victim(tuple(running), view)
            assert victim is None or any(victim is one for one in running), "the victim does not run"
        for offered in (1, 2, 17, 10**6):
            chunk = policy.chunk(view, offered)
            assert 1 <= int(chunk) <= offered, f"chunk() is {chunk!r} of {offered} tokens"
        for load in (Load(1, 1, 1, 1, 0, 1), Load(3, 256, 10**6, 8192, 10_000, 10_000)):
            answer = policy.admit(view, load)
            assert answer in (True, False), f"admit() is {answer!r}, not True or False"
    policy.served([], [], [])
    policy.served(views, [0] * len(views), [1] * len(views))
    policy.served(views, [10**9] * len(views), [0] * len(views))


def test_the_same_history_gives_the_same_steps(conformance: Conformance) -> None:
    """Neither a clock nor an address in memory nor chance of its own decides."""
    assert _steps_of(conformance.create()) == _steps_of(conformance.create())
    kept, orders = [], []
    for _ in range(3):
        policy: SchedulerPolicy = conformance.create()
        kept.append(ordinary(50, seed=1))  # kept, so that the next ones lie elsewhere
        for view in kept[-1]:
            policy.add(view)
        orders.append([view.sequence_number for view in drain(policy)])
    assert orders == [orders[0]] * 3


def _steps_of(policy: SchedulerPolicy) -> list[tuple[object, ...]]:
    steps: list[tuple[object, ...]] = []

    def note(plan: StepPlan) -> None:
        ids = [request.sequence_id for request in plan.requests]
        steps.append((ids, plan.num_new.tolist(), plan.swaps_out, plan.swaps_in))

    draw = random.Random(5)
    run = SchedulingHarness(policy, num_blocks=14, max_num_batched_tokens=16, num_host_blocks=20, before_step=note)
    for number in range(12):
        prompt = [draw.randint(0, 2) for _ in range(draw.randint(1, 20))]
        run.add(
            f"r{number}",
            prompt,
            draw.randint(1, 12),
            n=draw.choice([1, 1, 2]),
            user=draw.choice([None, "a", "b"]),
            priority=draw.randint(-1, 1),
        )
        for _ in range(draw.randint(0, 3)):
            run.step()
    run.run()
    run.check_answers()
    return steps


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_host_blocks", [0, 6, 60])
def test_requests_come_back_after_a_preemption(conformance: Conformance, num_host_blocks: int, depth: int) -> None:
    """With swap space, too little of it, and none; a policy that swaps computes nothing twice where there is enough."""
    policy: SchedulerPolicy = conformance.create()
    run = SchedulingHarness(
        policy,
        num_blocks=9,
        num_host_blocks=num_host_blocks,
        max_concurrent_steps=depth,
        enable_prefix_caching=False,
        max_num_batched_tokens=64,
    )
    for number in range(6):
        run.add(f"r{number}", [number] * 6, 14, user="ab"[number % 2], priority=number % 3)
    run.run()
    run.check_answers()
    stats = run.core.stats()
    assert stats.num_preemptions > 0, "in so small a cache somebody has to yield"
    assert stats.num_policy_faults == 0
    if policy.preemption == "swap" and num_host_blocks == 60:
        assert stats.num_swaps == stats.num_preemptions
        assert run.executor.num_tokens_computed == 6 * (6 + 13)


def test_nobody_waits_longer_than_is_claimed(conformance: Conformance) -> None:
    """Whoever keeps arriving and whatever the policy prefers: shorter, more urgent, of another user, without a hint."""
    claimed: SchedulerPolicy = conformance.create()
    bound = claimed.starvation_bound_s
    if bound is None:
        pytest.skip("no bound is claimed")
    spacing = max(1.0, bound / 40)
    modest = FakeRequestView(0, priority=10**6, user="a", num_prompt_tokens=10**5, max_tokens=10**6)
    for backlog in (1, 5):
        policy: SchedulerPolicy = conformance.create()
        entered: list[RequestView] = []
        policy.add(modest)
        for number in range(1, 200):
            policy.add(
                FakeRequestView(number, priority=-(10**6), user="b", max_tokens=1, arrival_time=number * spacing)
            )
            if number >= backlog:
                entered.append(policy.pop())
                policy.served([entered[-1]], [1], [1])
            if modest in entered:
                break
        late = [view for view in entered if view is not modest and view.arrival_time > bound]
        assert modest in entered, "it never enters"
        assert not late, f"{len(late)} that arrived more than {bound:g} s later entered before it"


@pytest.mark.parametrize("num_blocks", [18, 9])
def test_users_who_wait_are_served_alike_as_far_as_is_claimed(conformance: Conformance, num_blocks: int) -> None:
    """One user asks for much at once, then another; with room for all that run, and so little that some yield."""
    run = ServiceRun(conformance.create(), num_blocks)
    if run.bound is None:
        pytest.skip("no bound is claimed")
    draw = random.Random(num_blocks)
    for user, least in (("a", LONGEST_ANSWER // 2), ("b", 1)):
        for _ in range(40):
            run.add(user, draw.randint(1, LONGEST_PROMPT), draw.randint(least, LONGEST_ANSWER))
    ahead = []
    while run.waits("a") and run.waits("b"):
        ahead.append(run.served["a"] - run.served["b"])
        run.step()
    apart = max(ahead) - min(ahead)
    assert apart <= run.bound.most_apart, f"they are served {apart:g} apart, {run.bound.most_apart:g} is claimed"


@pytest.mark.parametrize("num_blocks", [18, 9])
def test_who_comes_back_waits_as_long_as_is_claimed(conformance: Conformance, num_blocks: int) -> None:
    run = ServiceRun(conformance.create(), num_blocks)
    if run.bound is None:
        pytest.skip("no bound is claimed")
    draw = random.Random(num_blocks)
    for number in range(80):
        run.add("ab"[number % 2], draw.randint(1, LONGEST_PROMPT), draw.randint(1, LONGEST_ANSWER))
    for _ in range(30):
        run.step()
    back, before = run.add("c", LONGEST_PROMPT, LONGEST_ANSWER), sum(run.served.values())
    while not run.entered(back):
        run.step()
        ahead = sum(run.served.values()) - run.served["c"] - before
        assert ahead <= 2 * run.bound.most_ahead, f"the two others were served {ahead:g} before it entered"


def test_many_waiting_requests_cost_little(policy: SchedulerPolicy) -> None:
    views = ordinary(MANY)
    start = process_time()
    for view in views:
        policy.add(view)
    for _ in range(MANY):
        policy.peek()
        policy.pop()
    taken = process_time() - start
    assert taken < CPU_SECONDS, f"{MANY} requests, added and taken out, took {taken:.1f} s of CPU time"
