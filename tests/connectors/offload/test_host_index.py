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


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_random_use_keeps_the_books_in_order(policy: str):
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
            block = index.reserve(key(number))
            assert (block is None) == (len({b.slot for b in busy}) == 5)
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
