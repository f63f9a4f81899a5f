"""Shares of users under the fair policy."""

from __future__ import annotations

import random

import pytest
from pydantic import ValidationError

from llmkit.testing.scheduling import SchedulingHarness
from llmkit.testing.waiting_requests import FakeRequestView as Waiting
from llmkit.testing.waiting_requests import drain
from llmkit_schedulers.fair import FairOptions, FairPolicy
from llmkit_schedulers.token_counters import Accounts


def build(**options):
    return FairPolicy(FairOptions(**options))


def order_of(policy):
    """Users in the order in which their requests are taken out."""
    return [view.user for view in drain(policy)]


class TestOrder:
    def test_users_take_turns_however_many_requests_one_of_them_has(self):
        policy = build()
        for i in range(6):
            policy.add(Waiting(i, user="a"))
        for i in range(6, 9):
            policy.add(Waiting(i, user="b"))
        assert order_of(policy) == ["a", "b", "a", "b", "a", "b", "a", "a", "a"]

    def test_a_long_prompt_costs_what_it_is(self):
        policy = build()
        policy.add(Waiting(0, user="a", num_prompt_tokens=30))
        policy.add(Waiting(1, user="a", num_prompt_tokens=30))
        for i in range(2, 7):
            policy.add(Waiting(i, user="b", num_prompt_tokens=10))
        assert order_of(policy) == ["a", "b", "b", "b", "a", "b", "b"]

    def test_output_tokens_are_charged_as_they_are_produced(self):
        policy = build(output_token_weight=3)
        mine = Waiting(0, user="a")
        policy.add(mine)
        assert policy.pop() is mine
        for i in range(1, 4):
            policy.add(Waiting(i, user="a"))
        for i in range(4, 14):
            policy.add(Waiting(i, user="b"))
        policy.served([mine], [1], [0])
        policy.served([mine], [0], [1])
        policy.served([mine], [0], [1])
        # a has 1 + 2 * 3, b was lifted to 1.
        assert order_of(policy)[:8] == ["b"] * 6 + ["a", "b"]

    def test_weights(self):
        policy = build(weights={"a": 3.0})
        for i in range(12):
            policy.add(Waiting(i, user="ab"[i % 2]))
        order = order_of(policy)[:8]
        assert order.count("a") == 6

    def test_requests_without_a_user_share_one_part(self):
        policy = build(default_user="nobody")
        for i in range(4):
            policy.add(Waiting(i))
        policy.add(Waiting(4, user="nobody"))
        policy.add(Waiting(5, user="a"))
        assert order_of(policy) == [None, "a", None, None, None, "nobody"]

    def test_within_a_user_by_arrival_also_after_a_preemption(self):
        policy = build()
        views = [Waiting(i, user="a") for i in range(4)]
        for view in views:
            policy.add(view)
        first = policy.pop()
        first.num_preemptions = 1
        policy.requeue(first)
        assert [view.sequence_number for view in drain(policy)] == [0, 1, 2, 3]


class TestCharging:
    def counter(self, policy, user="a"):
        return policy._accounts.find(user).counter

    def test_input_is_charged_once_whatever_happens_to_the_request(self):
        policy = build()
        view = Waiting(0, user="a", num_prompt_tokens=7)
        policy.add(view)
        for _ in range(3):
            assert policy.pop() is view
            assert self.counter(policy) == 7
            policy.requeue(view)
        policy.remove(view)
        assert self.counter(policy) == 7
        assert not policy._paid

    def test_answers_to_one_request_share_its_input(self):
        policy = build()
        for index in range(4):
            policy.add(Waiting(index, user="a", index=index, num_prompt_tokens=7))
        drain(policy)
        assert self.counter(policy) == 7

    def test_who_comes_back_is_lifted_to_the_least_of_those_that_wait(self):
        policy = build()
        for i in range(40):
            policy.add(Waiting(i, user="ab"[i % 2]))
        for _ in range(20):
            policy.pop()
        policy.add(Waiting(100, user="late"))
        assert self.counter(policy, "late") == 10
        assert order_of(policy)[:4] == ["a", "b", "late", "a"]

    def test_with_nobody_waiting_to_the_one_who_waited_last(self):
        policy = build()
        mine = Waiting(0, user="a", num_prompt_tokens=50)
        policy.add(mine)
        policy.pop()
        policy.served([mine], [50], [1])
        policy.add(Waiting(1, user="late"))
        assert self.counter(policy, "late") == 52

    def test_who_only_had_a_request_running_has_saved_up_nothing_when_it_is_preempted(self):
        policy = build()
        low, high = Waiting(0, user="low"), Waiting(1, user="high", num_prompt_tokens=100)
        for view in (low, high):
            policy.add(view)
        policy.pop(), policy.pop()
        policy.add(Waiting(2, user="high"))
        policy.requeue(low)
        assert self.counter(policy, "low") == self.counter(policy, "high") == 100
        assert policy.peek() is low

    def test_who_has_got_most_yields_the_youngest(self):
        policy = build()
        views = [Waiting(0, user="a"), Waiting(1, user="b"), Waiting(2, user="a"), Waiting(3, user="b")]
        policy.served(views, [0] * 4, [5, 1, 1, 1])
        assert policy.victim(views, views[1]) is views[2]
        assert policy.victim([Waiting(9, user="new"), views[1]], views[1]) is views[1]


class TestAccounts:
    def test_users_who_have_gone_are_forgotten_when_there_are_many(self):
        accounts = Accounts({})
        for i in range(30_000):
            view = Waiting(i)
            accounts.add(f"user-{i}", view)
            account = accounts.least()
            accounts.remove(account, view)
            account.counter += i % 7
        assert len(accounts._accounts) <= 4096
        assert len(accounts._heap) <= 2

    def test_against_the_plain_definition(self):
        """Random requests, charges and removals; the least is found by looking at everybody."""
        draw = random.Random(3)
        accounts, waiting = Accounts({}), {}
        for number in range(4000):
            user = f"u{draw.randrange(12)}"
            what = draw.random()
            if what < 0.4:
                view = Waiting(number)
                accounts.add(user, view)
                waiting.setdefault(user, []).append(view)
            elif what < 0.7:
                accounts.get(user).counter += draw.randrange(5)
            elif waiting.get(user):
                view = waiting[user].pop(draw.randrange(len(waiting[user])))
                accounts.remove(accounts.find(user), view)
                if draw.random() < 0.3:
                    accounts.add(user, view)
                    waiting[user] = sorted([*waiting[user], view], key=lambda one: one.sequence_number)
            expected = min(
                ((accounts.find(user).counter, views[0].sequence_number) for user, views in waiting.items() if views),
                default=None,
            )
            found = accounts.least()
            assert (found and (found.counter, found.first_number)) == expected
            assert accounts.num_waiting == sum(map(len, waiting.values()))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [12, 64])
def test_two_backlogged_users_get_the_same_within_the_bound(num_blocks, depth):
    """Point 3 of `FairPolicy.service_bound` in a whole engine, at every moment while both have requests waiting."""
    draw = random.Random(num_blocks + depth)
    policy = build()
    run = SchedulingHarness(
        policy, num_blocks=num_blocks, max_num_seqs=4, max_num_batched_tokens=24, max_concurrent_steps=depth
    )
    longest_prompt, longest_answer = 24, 12
    for i in range(60):
        user = "ab"[i >= 40]
        prompt = [draw.randrange(50) for _ in range(draw.randint(1, longest_prompt))]
        run.add(f"{user}{i}", prompt, draw.randint(1, longest_answer), user=user)
    bound = policy.service_bound(longest_prompt, 4 * (longest_prompt + longest_answer)).most_apart
    a, b = policy._accounts.find("a"), policy._accounts.find("b")
    steps = 0
    while len(a.waiting) and len(b.waiting):
        run.step()
        steps += 1
        assert abs(a.counter - b.counter) <= bound
    assert steps > 20
    run.run()
    run.check_answers()


@pytest.mark.parametrize(
    "options",
    [
        {"weights": {"a": 0}},
        {"weights": {"a": float("nan")}},
        {"input_token_weight": 0},
        {"output_token_weight": -1},
        {"default_user": ""},
        {"wieghts": {}},
    ],
)
def test_bad_options(options):
    with pytest.raises(ValidationError):
        FairOptions(**options)
