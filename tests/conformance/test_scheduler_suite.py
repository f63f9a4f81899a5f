"""Every check of the suite for policies notices what it is there for."""

from __future__ import annotations

import inspect
import random
import time
from types import SimpleNamespace

import pytest

from llmkit.testing.conformance import scheduler_suite as suite
from llmkit.testing.hostile_policy import HostilePolicy
from llmkit_schedulers.fair import FairOptions, FairPolicy
from llmkit_schedulers.fcfs import FcfsPolicy
from llmkit_schedulers.priority import PriorityOptions, PriorityPolicy


class Forgetful(FcfsPolicy):
    def add(self, request):
        if request.sequence_number % 7:
            super().add(request)


class Repeating(FcfsPolicy):
    def remove(self, request):
        """Removed requests stay."""


class LosesThePreempted(FcfsPolicy):
    def requeue(self, request):
        """Nothing waits again."""


class HasOneQueue(FcfsPolicy):
    """All policies of the process are one."""

    waiting = FcfsPolicy()._waiting

    def __init__(self):
        super().__init__()
        self._waiting = self.waiting


class Hoards(FcfsPolicy):
    """Keeps everybody's record."""

    def __init__(self):
        super().__init__()
        self.records = {}

    def add(self, request):
        self.records[request] = request.num_prompt_tokens
        super().add(request)


class Impatient(FcfsPolicy):
    preemption = "throw away"


class Endless(FcfsPolicy):
    starvation_bound_s = float("inf")


class PeeksAway(FcfsPolicy):
    def peek(self):
        request = super().peek()
        if request is not None:
            self.remove(request)
        return request


class PopsNone(FcfsPolicy):
    def pop(self):
        return super().pop() if len(self) else None


class Greedy(FcfsPolicy):
    def chunk(self, request, offered):  # noqa: ARG002
        return offered + 1


class Trusting(FcfsPolicy):
    """Takes extra arguments for what it hopes for."""

    def key(self, request):
        return float(request.extra_args.get("hint", 0))


class Stranger(FcfsPolicy):
    def victim(self, running, needing):  # noqa: ARG002
        return suite.FakeRequestView(77)


class Lottery(FcfsPolicy):
    def __init__(self):
        super().__init__()
        self.draw = random.Random(time.perf_counter_ns())

    def key(self, request):  # noqa: ARG002
        return self.draw.random()


class ByAddress(FcfsPolicy):
    def key(self, request):
        return id(request) % 4093


class YoungestFirst(FcfsPolicy):
    """Claims the bound of its base class."""

    def key(self, request):
        return -request.sequence_number


class Starving(FcfsPolicy):
    starvation_bound_s = 100.0

    def key(self, request):
        return request.priority


class Unfair(FcfsPolicy):
    """Claims what only shares per user give."""

    def service_bound(self, longest_prompt, batch_tokens):
        return FairPolicy().service_bound(longest_prompt, batch_tokens)


class Slow(FcfsPolicy):
    def peek(self):
        waiting = sorted(self._waiting, key=lambda request: request.sequence_number)
        return waiting[0] if waiting else None


class FailsWhenServed(FcfsPolicy):
    def served(self, requests, num_prompt_tokens, num_output_tokens):  # noqa: ARG002
        return 1 / len(requests)


BROKEN = {
    HostilePolicy: {"test_random_load_is_answered_right", "test_every_request_comes_up_once"},
    Forgetful: {"test_random_load_is_answered_right", "test_every_request_comes_up_once"},
    Repeating: {"test_removed_requests_do_not_come_up_unless_they_are_added_again"},
    LosesThePreempted: {"test_a_request_that_was_preempted_waits_again", "test_requests_come_back_after_a_preemption"},
    HasOneQueue: {"test_policies_have_nothing_in_common"},
    Hoards: {"test_requests_that_have_gone_are_let_go"},
    Impatient: {"test_attributes_are_what_the_core_knows"},
    Endless: {"test_attributes_are_what_the_core_knows"},
    PeeksAway: {"test_every_request_comes_up_once"},
    PopsNone: {"test_an_empty_queue"},
    Greedy: {"test_random_load_is_answered_right", "test_answers_keep_to_the_contract"},
    Trusting: {"test_every_request_comes_up_once"},
    Stranger: {"test_answers_keep_to_the_contract", "test_requests_come_back_after_a_preemption"},
    Lottery: {"test_the_same_history_gives_the_same_steps"},
    ByAddress: {"test_the_same_history_gives_the_same_steps"},
    YoungestFirst: {"test_nobody_waits_longer_than_is_claimed"},
    Starving: {"test_nobody_waits_longer_than_is_claimed"},
    Unfair: {
        "test_users_who_wait_are_served_alike_as_far_as_is_claimed",
        "test_who_comes_back_waits_as_long_as_is_claimed",
    },
    Slow: {"test_many_waiting_requests_cost_little"},
    FailsWhenServed: {"test_answers_keep_to_the_contract"},
}


def arguments_of(check):
    """Every set of values that pytest would call `check` with."""
    sets = [{}]
    for mark in getattr(check, "pytestmark", []):
        if mark.name == "parametrize":
            sets = [one | {mark.args[0]: value} for one in sets for value in mark.args[1]]
    return sets


def fails(name, make):
    """Whether a check fails for a policy with any of its parameters."""
    check = getattr(suite, name)
    conformance = SimpleNamespace(create=make)
    wanted = inspect.signature(check).parameters
    for values in arguments_of(check):
        fixtures = {"policy": make} if "policy" in wanted else {"conformance": lambda: conformance}
        try:
            check(**{key: make() for key, make in fixtures.items()}, **values)
        except pytest.skip.Exception:
            continue
        except BaseException:
            return True
    return False


# Sorted: the processes of `pytest -n` must all find the tests in the same order, which sets of texts do not keep.
@pytest.mark.parametrize(
    ("policy", "name"), [(policy, name) for policy, names in BROKEN.items() for name in sorted(names)]
)
def test_a_broken_policy_is_noticed(policy, name, monkeypatch):
    monkeypatch.setattr(suite, "MANY", 5000)
    monkeypatch.setattr(suite, "CPU_SECONDS", 0.4)
    assert fails(name, policy)


def test_every_check_is_tried_on_something_broken():
    checks = {name for name in vars(suite) if name.startswith("test_")}
    assert checks == set().union(*BROKEN.values())


@pytest.mark.parametrize("name", [name for name in vars(suite) if name.startswith("test_")])
@pytest.mark.parametrize(
    "policy",
    [
        FcfsPolicy,
        FairPolicy,
        lambda: FairPolicy(FairOptions(input_token_weight=3, output_token_weight=1, weights={"b": 0.5})),
        lambda: PriorityPolicy(PriorityOptions(aging_s=2, aging_levels=5)),
    ],
    ids=["fcfs", "fair", "fair, weighted", "priority, aging"],
)
def test_a_good_policy_passes(name, policy):
    assert not fails(name, policy)
