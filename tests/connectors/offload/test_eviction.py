from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from llmkit_connectors.offload.eviction import AdaptiveReplacement, EvictionPolicy, LeastRecentlyUsed, make_policy


def anything(key: object) -> bool:  # noqa: ARG001
    return True


def run(policy: EvictionPolicy, capacity: int, keys: list[int]) -> list[bool]:
    """Ask for `keys` one after another as a cache would; which of them were there."""
    there: set[int] = set()
    hits = []
    for key in keys:
        hits.append(key in there)
        if key in there:
            policy.use(key)
            continue
        if len(there) == capacity:
            victim = policy.victim(key, anything)
            assert victim in there
            there.remove(victim)
        policy.insert(key)
        there.add(key)
        assert len(policy) == len(there) <= capacity
    return hits


class ReferenceARC:
    """The algorithm as the paper prints it (figure 4), for comparison."""

    def __init__(self, c: int) -> None:
        self.c, self.p = c, 0.0
        self.t1, self.t2, self.b1, self.b2 = OrderedDict(), OrderedDict(), OrderedDict(), OrderedDict()

    def replace(self, x: int) -> None:
        if self.t1 and (len(self.t1) > self.p or (x in self.b2 and len(self.t1) == self.p)):
            self.b1[self.t1.popitem(last=False)[0]] = None
        else:
            self.b2[self.t2.popitem(last=False)[0]] = None

    def request(self, x: int) -> bool:
        if x in self.t1 or x in self.t2:
            self.t1.pop(x, None)
            self.t2.pop(x, None)
            self.t2[x] = None
            return True
        if x in self.b1:
            self.p = min(self.p + max(len(self.b2) / len(self.b1), 1), self.c)
            self.replace(x)
            del self.b1[x]
            self.t2[x] = None
            return False
        if x in self.b2:
            self.p = max(self.p - max(len(self.b1) / len(self.b2), 1), 0)
            self.replace(x)
            del self.b2[x]
            self.t2[x] = None
            return False
        if len(self.t1) + len(self.b1) == self.c:
            if len(self.t1) < self.c:
                self.b1.popitem(last=False)
                self.replace(x)
            else:
                self.t1.popitem(last=False)
        elif len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) >= self.c:
            if len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) == 2 * self.c:
                self.b2.popitem(last=False)
            self.replace(x)
        self.t1[x] = None
        return False


@pytest.mark.parametrize("capacity", [1, 2, 3, 8, 20])
@pytest.mark.parametrize("seed", range(4))
def test_arc_does_what_the_paper_says(capacity: int, seed: int):
    choose = random.Random(seed)
    keys = [choose.randrange(12) if choose.random() < 0.5 else choose.randrange(60) for _ in range(1500)]
    keys += list(range(100, 160)) + keys[:300]
    reference = ReferenceARC(capacity)
    assert run(AdaptiveReplacement(capacity), capacity, keys) == [reference.request(key) for key in keys]


def test_least_recently_used():
    policy = LeastRecentlyUsed()
    for key in (1, 2, 3):
        policy.insert(key)
    policy.use(1)
    assert [policy.victim(9, anything) for _ in range(4)] == [2, 3, 1, None]


def test_a_long_scan_does_not_push_out_what_arc_has_seen_twice():
    popular = list(range(8))
    scan = list(range(100, 400))
    keys = popular + popular + scan + popular
    arc = run(make_policy("arc", 16), 16, keys)
    lru = run(make_policy("lru", 16), 16, keys)
    assert all(arc[-8:])
    assert not any(lru[-8:])


@pytest.mark.parametrize("name", ["lru", "arc"])
def test_what_may_not_leave_is_passed_over(name: str):
    policy = make_policy(name, 4)
    for key in range(4):
        policy.insert(key)
    policy.use(0)
    assert policy.victim(9, lambda key: key == 0) == 0
    assert policy.victim(9, lambda key: key == 0) is None
    assert len(policy) == 3


@pytest.mark.parametrize("name", ["lru", "arc"])
def test_a_refreshed_key_leaves_after_its_kind(name: str):
    policy = make_policy(name, 3)
    for key in range(3):
        policy.insert(key)
    policy.refresh(0)
    assert [policy.victim(9, anything) for _ in range(3)] == [1, 2, 0]


@pytest.mark.parametrize("name", ["lru", "arc"])
def test_what_was_passed_over_counts_as_young(name: str):
    policy = make_policy(name, 4)
    for key in range(4):
        policy.insert(key)
    asked: list[object] = []

    def may_leave(key: object) -> bool:
        asked.append(key)
        return key not in (0, 1)

    assert policy.victim(9, may_leave) == 2
    assert policy.victim(9, may_leave) == 3
    assert asked == [0, 1, 2, 3]
    assert policy.victim(9, anything) == 0


def test_removed_keys_are_no_ghosts():
    policy = AdaptiveReplacement(2)
    policy.insert(1)
    policy.insert(2)
    policy.remove(1)
    assert (len(policy), policy.num_ghosts) == (1, 0)
    policy.insert(3)
    assert policy.victim(4, anything) == 2
    assert policy.num_ghosts == 1


def test_arc_needs_room_for_one():
    with pytest.raises(ValueError, match="at least 1"):
        AdaptiveReplacement(0)
