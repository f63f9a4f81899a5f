from __future__ import annotations

import random

import pytest

from llmkit_connectors.offload.block_key import BlockKey
from llmkit_connectors.offload.host_index import HostBlock, HostIndex


def key(number: int) -> BlockKey:
    return BlockKey(0, number.to_bytes(4, "little"))


def store(index: HostIndex, number: int) -> HostBlock:
    block = index.reserve(key(number))
    assert block is not None
    block.ready = True
    index.release(block)
    return block


def test_the_limit_is_kept_and_the_oldest_leaves():
    index = HostIndex(3, "lru")
    for number in range(10):
        store(index, number)
        assert index.num_used <= 3
        index.check_integrity()
    assert [n for n in range(10) if index.find(key(n))] == [7, 8, 9]
    assert index.num_evictions == 7


def test_a_slot_in_use_is_not_given_away():
    index = HostIndex(2, "lru")
    first = index.reserve(key(1))
    store(index, 2)
    third = index.reserve(key(3))
    assert first is not None
    assert third is not None
    assert third.slot != first.slot
    assert index.find(key(2)) is None
    assert index.reserve(key(4)) is None  # both are being filled
    index.release(first)
    assert index.reserve(key(4)) is not None


def test_what_did_not_arrive_is_not_found_and_its_slot_comes_back():
    index = HostIndex(1, "arc")
    block = index.reserve(key(1))
    assert block is not None
    index.fail(block)
    assert index.find(key(1)) is None
    assert index.reserve(key(2)) is None
    index.release(block)
    assert store(index, 2).slot == block.slot
    index.check_integrity()


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_of_a_long_sequence_the_beginning_stays(policy: str):
    index = HostIndex(4, policy)
    stored = []
    for number in range(1, 9):
        block = index.reserve(key(number), key(number - 1).content_hash)
        if block is not None:
            block.ready = True
            index.release(block)
            stored.append(number)
        index.check_integrity()
    assert stored == [1, 2, 3, 4]
    for number in (4, 3, 2, 1):
        index.refresh(key(number))
    store(index, 50)
    assert [n for n in range(100) if index.find(key(n))] == [1, 2, 3, 50]


def test_a_parent_that_has_left_is_no_obstacle():
    index = HostIndex(3, "lru")
    parent = store(index, 1)
    child = index.reserve(key(2), key(1).content_hash)
    assert child is not None
    index.fail(parent)
    index.release(child)
    index.check_integrity()
    index.fail(child)
    assert index.num_used == 0
    assert index.reserve(key(3), key(2).content_hash) is not None


def test_clear_forgets_everything_but_waits_for_transfers():
    index = HostIndex(3, "arc")
    store(index, 1)
    reading = store(index, 2)
    index.acquire(reading)
    index.clear()
    assert index.find(key(1)) is None
    assert index.find(key(2)) is None
    slots = {store(index, 3).slot, store(index, 4).slot}
    assert reading.slot not in slots
    index.release(reading)
    assert reading.slot == store(index, 5).slot
    assert index.num_evictions == 0
    index.check_integrity()


@pytest.mark.parametrize("with_parents", [False, True])
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_random_use_keeps_the_books_in_order(policy: str, with_parents: bool):
    choose = random.Random(7)
    index = HostIndex(5, policy)
    busy: list[HostBlock] = []
    for _ in range(4000):
        number = choose.randrange(12)
        known = index.find(key(number))
        action = choose.random()
        if action < 0.02:
            index.clear()
        elif busy and action < 0.5:
            block = busy.pop(choose.randrange(len(busy)))
            if not block.ready and choose.random() < 0.3:
                index.fail(block)
            elif not block.forgotten:
                block.ready = True
            index.release(block)
        elif known is None:
            parent_hash = key(number - 1).content_hash if with_parents and number else None
            block = index.reserve(key(number), parent_hash)
            assert with_parents or (block is None) == (len({b.slot for b in busy}) == 5)
            busy += [block] if block else []
        elif known.ready:
            index.use(key(number))
            index.refresh(key(choose.randrange(12)))
            index.acquire(known)
            busy.append(known)
        index.check_integrity()
        slots: dict[int, HostBlock] = {}
        for block in busy:
            assert slots.setdefault(block.slot, block) is block, "one slot, two blocks in use"
