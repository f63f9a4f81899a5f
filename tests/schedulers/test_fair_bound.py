"""What `FairPolicy.service_bound` claims, held against random histories: each step of its argument.

The history is worse than an engine makes them: whoever runs may be preempted at any moment, and users come and go.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from llmkit.testing.waiting_requests import FakeRequestView
from llmkit_schedulers.fair import FairOptions, FairPolicy

DEEP = os.environ.get("LLMKIT_DEEP_TESTS") == "1"
USERS, NUM_SEQS, LONGEST_PROMPT, LONGEST_ANSWER = "abcd", 2, 4, 12
FULL_BATCH = NUM_SEQS * (LONGEST_PROMPT + LONGEST_ANSWER)
SLACK = 1e-9
"""Of sums of fractions."""

KINDS = st.fixed_dictionaries(
    dict.fromkeys(USERS, st.sampled_from([(1, LONGEST_ANSWER), (LONGEST_PROMPT, 1), (1, 1), (2, 5)]))
)
"""Prompt and answer of each user's requests."""

EVENT = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(USERS), st.integers(1, 8)),
    st.tuples(st.just("steps"), st.integers(1, 24), st.integers(0, NUM_SEQS)),
    st.tuples(st.just("steps"), st.integers(1, 24), st.just(NUM_SEQS)),
    st.tuples(st.just("preempt"), st.integers(0, NUM_SEQS - 1)),
    st.tuples(st.just("leave"), st.sampled_from(USERS)),
)
"""Requests arrive; in so many steps at most so many enter, and all that run get a token; one is preempted; those of a
user that wait are aborted."""

HISTORY = st.lists(EVENT, min_size=10, max_size=40)
WEIGHTS = st.sampled_from([(1.0, 2.0), (1.0, 1.0), (3.0, 1.0)])
SHARES = st.sampled_from([{}, {"a": 2.0}, {"a": 0.5, "b": 3.0}])


@dataclass(eq=False)
class Arrival:
    """Of a user's only request. served: what each user had got. others: who has had requests waiting ever since."""

    served: dict[str, float]
    others: set[str]


@dataclass
class History:
    """A policy, what runs under it, and a book of its own of what every user was served."""

    policy: FairPolicy
    kinds: dict[str, tuple[int, int]]
    answers: dict[FakeRequestView, int] = field(default_factory=dict)
    waiting: list[FakeRequestView] = field(default_factory=list)
    running: list[FakeRequestView] = field(default_factory=list)
    entered: set[FakeRequestView] = field(default_factory=set)
    served: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    first: dict[FakeRequestView, Arrival] = field(default_factory=dict)
    ahead: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bound = self.policy.service_bound(LONGEST_PROMPT, FULL_BATCH)

    def waits(self, user: str) -> bool:
        return any(view.user == user for view in self.waiting)

    def serve(self, user: str, cost: float) -> None:
        self.served[user] += cost / self.bound.weights.get(user, 1.0)

    def add(self, user: str, count: int) -> None:
        for _ in range(count):
            self.arrive(user, *self.kinds[user])

    def arrive(self, user: str, prompt: int, answer: int) -> None:
        view = FakeRequestView(len(self.answers), user=user, num_prompt_tokens=prompt, max_tokens=answer)
        self.answers[view] = answer
        if not self.waits(user) and all(view.user != user for view in self.running):
            others = {one for one in USERS if one != user and self.waits(one)}
            self.first[view] = Arrival(dict(self.served), others)
        self.waiting.append(view)
        self.policy.add(view)

    def left(self, view: FakeRequestView) -> int:
        """Tokens that it may still get."""
        return self.answers[view] - view.num_output_tokens

    def steps(self, count: int, most: int) -> None:
        for _ in range(count):
            self.step(most)
            self.check()

    def step(self, most: int) -> None:
        for _ in range(min(most, NUM_SEQS - len(self.running))):
            if not self.waiting:
                break
            view = self.policy.pop()
            assert view in self.waiting
            self.waiting.remove(view)
            if view not in self.entered:
                self.entered.add(view)
                self.check_wait(view)
                self.serve(view.user, view.num_prompt_tokens * self.bound.prompt_token)
            self.running.append(view)
        self.policy.served(self.running, [0] * len(self.running), [1] * len(self.running))
        for view in list(self.running):
            view.num_output_tokens += 1
            self.serve(view.user, self.bound.output_token)
            if not self.left(view):
                self.running.remove(view)

    def preempt(self, position: int) -> None:
        if position < len(self.running):
            view = self.running.pop(position)
            view.num_preemptions += 1
            self.waiting.append(view)
            self.policy.requeue(view)

    def leave(self, user: str) -> None:
        for view in [view for view in self.waiting if view.user == user]:
            self.waiting.remove(view)
            self.first.pop(view, None)
            self.policy.remove(view)

    def check_wait(self, view: FakeRequestView) -> None:
        """Point 4: what the others have got from its arrival to its entry."""
        arrival = self.first.pop(view, None)
        if arrival is None:
            return
        got = {user: self.served[user] - arrival.served.get(user, 0.0) for user in USERS if user != view.user}
        assert all(got[user] <= self.bound.most_ahead + SLACK for user in arrival.others)
        lightest = min([1.0, *self.bound.weights.values()])
        ran_on = self.bound.output_token * FULL_BATCH / lightest
        assert sum(got.values()) <= len(got) * self.bound.most_ahead + ran_on + SLACK

    def check(self) -> None:
        """Points 2 and 3, and what is kept of who waits all the time for point 4."""
        for arrival in self.first.values():
            arrival.others = {user for user in arrival.others if self.waits(user)}
        users = [user for user in USERS if self.waits(user)]
        counters = [self.policy._accounts.find(user).counter for user in users]  # type: ignore[union-attr]
        if counters:
            assert max(counters) - min(counters) <= self.bound.most_apart / 2 + SLACK
        pairs = {(one, other) for one in users for other in users if one < other}
        self.ahead = {pair: self.ahead.get(pair, []) for pair in pairs}
        for (one, other), ahead in self.ahead.items():
            ahead.append(self.served[one] - self.served[other])
            assert max(ahead) - min(ahead) <= self.bound.most_apart + SLACK


@settings(max_examples=3000 if DEEP else 100, deadline=None, derandomize=not DEEP)
@given(HISTORY, KINDS, WEIGHTS, SHARES)
def test_random_histories_keep_to_the_bound(
    history: list[tuple[str, ...]],
    kinds: dict[str, tuple[int, int]],
    weights: tuple[float, float],
    shares: dict[str, float],
) -> None:
    prompt, output = weights
    options = FairOptions(weights=shares, input_token_weight=prompt, output_token_weight=output)
    run = History(FairPolicy(options), kinds)
    for what, *arguments in history:
        getattr(run, what)(*arguments)
        run.check()
