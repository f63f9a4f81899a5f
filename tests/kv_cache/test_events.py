from __future__ import annotations

import msgspec
import pytest

from llmkit.kv_cache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    short_hash,
    with_short_hashes,
)
from llmkit.kv_cache.hashing import BlockHasher, ExtraKey


@pytest.fixture
def events():
    return []


def test_stored_names_parent_tokens_and_adapter(make_harness, events):
    harness = make_harness(on_event=events.append)
    harness.finish("a", list(range(10)), extra_keys=(ExtraKey("lora", "poet"),))
    chain = BlockHasher(4).chain(None, (ExtraKey("lora", "poet"),))
    chain.extend(list(range(10)), 2)
    (event,) = events
    assert event == BlockStored(
        block_hashes=tuple(chain.hashes),
        parent_block_hash=None,
        token_ids=list(range(8)),
        block_size=4,
        lora_name="poet",
    )


def test_growth_is_stored_with_its_parent(make_harness, events, sequence):
    harness = make_harness(on_event=events.append)
    seq = sequence("a", list(range(4)))
    for length in (4, 6, 8):
        seq.token_ids[:] = range(length)
        harness.manager.allocate(seq, length)
        harness.manager.commit(seq, length)
    assert [event.token_ids for event in events] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert events[1].parent_block_hash == events[0].block_hashes[0]


def test_content_that_was_there_is_not_stored_again(make_harness, events):
    harness = make_harness(on_event=events.append)
    harness.finish("a", list(range(8)))
    harness.finish("b", list(range(8)))
    harness.finish("c", [*range(8), 8, 9, 10, 11])
    assert [event.token_ids for event in events] == [list(range(8)), [8, 9, 10, 11]]


def test_a_gap_splits_the_event(make_harness, events):
    harness = make_harness(on_event=events.append, num_blocks=17)
    first, second = harness.run("a", [1, 1, 1, 1]), harness.run("b", [1, 1, 1, 1, 2, 2, 2, 2])
    manager = harness.manager
    manager.free(second)
    manager.free(first)
    events.clear()
    chain = BlockHasher(4).chain()
    chain.extend([1] * 4 + [2] * 4 + [3] * 4, 3)
    manager._reporter.stored(0, [0, 2], chain, [1] * 4 + [2] * 4 + [3] * 4, ())
    assert [(event.token_ids, event.parent_block_hash) for event in events] == [
        ([1] * 4, None),
        ([3] * 4, chain.hashes[1]),
    ]


def test_removed_tells_every_hash_and_group(make_harness, events):
    harness = make_harness(on_event=events.append, num_blocks=5, windows=(None, 64))
    harness.finish("a", list(range(8)))
    stored = {(event.group, block_hash) for event in events for block_hash in event.block_hashes}
    assert len(stored) == 4
    events.clear()
    harness.manager.allocate(harness.run("b", [9]), 8)
    removed = [event for event in events if isinstance(event, BlockRemoved)]
    assert {(event.group, block_hash) for event in removed for block_hash in event.block_hashes} == stored


def test_reset_is_cleared(make_harness, events):
    harness = make_harness(on_event=events.append)
    seq = harness.run("a", list(range(8)))
    events.clear()
    assert harness.manager.reset_prefix_cache() is False
    assert events == []
    harness.manager.free(seq)
    assert harness.manager.reset_prefix_cache() is True
    assert events == [AllBlocksCleared()]


def test_wire_form_is_a_map_with_type_and_64_bit_hashes(make_harness, events):
    harness = make_harness(on_event=events.append)
    harness.finish("a", list(range(12)))
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(with_short_hashes(events[0])))
    assert wire["type"] == "BlockStored"
    assert wire["medium"] == "GPU"
    assert wire["parent_block_hash"] is None
    assert all(0 <= block_hash < 2**64 for block_hash in wire["block_hashes"])
    assert len(wire["block_hashes"]) == 3
    removed = with_short_hashes(BlockRemoved(block_hashes=events[0].block_hashes))
    assert list(removed.block_hashes) == wire["block_hashes"]
    assert with_short_hashes(AllBlocksCleared()) == AllBlocksCleared()
    assert short_hash(7) == 7
    child = BlockStored(
        block_hashes=(b"\1" * 32,), parent_block_hash=b"\0" * 7 + b"\2" * 25, token_ids=[], block_size=4
    )
    assert with_short_hashes(child).parent_block_hash == 2
