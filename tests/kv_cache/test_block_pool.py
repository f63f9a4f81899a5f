from __future__ import annotations

import pytest

from llmkit.kv_cache.block_pool import NULL_BLOCK, BlockPool, IntegrityError


def test_null_block_is_never_handed_out():
    pool = BlockPool(5)
    assert sorted(pool.take(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    pool.acquire([NULL_BLOCK])
    pool.release([NULL_BLOCK])
    assert pool.references(NULL_BLOCK) == 0


def test_a_pool_needs_more_than_the_null_block():
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(1)


def test_take_is_all_or_nothing():
    pool = BlockPool(4)
    with pytest.raises(ValueError, match="4 blocks were asked for but only 3 are free"):
        pool.take(4)
    assert pool.num_free == 3
    pool.check_integrity({})


def test_shared_block_is_free_when_its_last_holder_lets_go():
    pool = BlockPool(3)
    (block,) = pool.take(1)
    pool.acquire([block])
    pool.release([block])
    assert pool.num_free == 1
    pool.release([block])
    assert pool.num_free == 2


def test_release_of_a_free_block_is_a_defect():
    pool = BlockPool(3)
    with pytest.raises(IntegrityError, match="block 2 was released but nobody holds it"):
        pool.release([2])


def test_unhashed_blocks_are_reused_before_cached_ones():
    pool = BlockPool(5)
    blocks = pool.take(4)
    pool.register(blocks[0], 0, b"a")
    pool.register(blocks[2], 0, b"c")
    pool.release(blocks)
    assert set(pool.free_queue()[:2]) == {blocks[1], blocks[3]}
    assert pool.free_queue()[2:] == [blocks[0], blocks[2]]


def test_cached_blocks_are_evicted_least_recently_used_first():
    removed = []
    pool = BlockPool(4, on_removed=lambda group, block_hash: removed.append((group, block_hash)))
    a, b, c = pool.take(3)
    for block, block_hash in ((a, b"a"), (b, b"b"), (c, b"c")):
        pool.register(block, 0, block_hash)
    pool.release([a, b, c])
    pool.acquire([a])
    pool.release([a])
    assert pool.take(2) == [b, c]
    assert removed == [(0, b"b"), (0, b"c")]
    assert pool.num_evictions == 2
    assert pool.indices[0] == {b"a": a}


def test_acquire_takes_a_cached_block_out_of_the_middle_of_the_queue():
    pool = BlockPool(4)
    blocks = pool.take(3)
    for block in blocks:
        pool.register(block, 0, bytes([block]))
    pool.release(blocks)
    pool.acquire([blocks[1]])
    assert pool.free_queue() == [blocks[0], blocks[2]]
    pool.check_integrity({blocks[1]: 1})


def test_groups_have_indices_of_their_own():
    pool = BlockPool(4, num_groups=2)
    a, b = pool.take(2)
    assert pool.register(a, 0, b"x")
    assert pool.register(b, 1, b"x")
    assert (pool.indices[0][b"x"], pool.indices[1][b"x"]) == (a, b)


def test_duplicate_content_keeps_the_block_in_use():
    pool = BlockPool(4)
    a, b = pool.take(2)
    assert pool.register(a, 0, b"x")
    assert not pool.register(b, 0, b"x")
    assert not pool.register(a, 0, b"x")
    assert pool.indices[0][b"x"] == a
    assert pool.content(b) is None


def test_duplicate_content_moves_from_a_free_block_to_the_held_one():
    removed = []
    pool = BlockPool(4, on_removed=lambda *what: removed.append(what))
    a, b = pool.take(2)
    pool.register(a, 0, b"x")
    pool.release([a])
    assert not pool.register(b, 0, b"x")
    assert pool.indices[0][b"x"] == b
    assert pool.content(a) is None
    assert pool.free_queue()[0] == a
    assert removed == []
    pool.check_integrity({b: 1})


def test_only_held_blocks_without_other_content_can_be_registered():
    pool = BlockPool(4, num_groups=2)
    with pytest.raises(IntegrityError, match="block 1"):
        pool.register(1, 0, b"x")
    (a,) = pool.take(1)
    pool.register(a, 0, b"x")
    for group, block_hash in ((0, b"y"), (1, b"x")):
        with pytest.raises(IntegrityError, match="other content"):
            pool.register(a, group, block_hash)


def test_forget_empties_the_index_and_keeps_the_blocks():
    pool = BlockPool(4)
    a, b = pool.take(2)
    pool.register(a, 0, b"x")
    pool.register(b, 0, b"y")
    pool.release([a, b])
    pool.forget()
    assert (pool.num_cached, pool.num_free) == (0, 3)
    assert pool.free_queue()[:2] == [a, b], "blocks whose memory is there come before one that was never written"
    pool.check_integrity({})


def _lose_reference(pool: BlockPool) -> None:
    pool._references[1] = 0


def _miscount(pool: BlockPool) -> None:
    pool.num_free += 1


def _break_link(pool: BlockPool) -> None:
    pool._previous[pool._next[NULL_BLOCK]] = 1


def _make_circle(pool: BlockPool) -> None:
    first = pool._next[NULL_BLOCK]
    last = pool._previous[NULL_BLOCK]
    pool._next[last], pool._previous[first] = first, last


def _drop_from_index(pool: BlockPool) -> None:
    pool.indices[0].clear()


def _mislead_index(pool: BlockPool) -> None:
    pool.indices[0][b"x"] = 2


def _cache_null(pool: BlockPool) -> None:
    pool._hashes[NULL_BLOCK] = b"x"


def _misplace_cached(pool: BlockPool) -> None:
    first = pool._next[NULL_BLOCK]
    pool._hashes[first] = b"y"
    pool.indices[0][b"y"] = first


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_lose_reference, "block 1 counts 0 references but 1 tables hold it"),
        (_miscount, "the free queue has 4 blocks but 5 are counted"),
        (_break_link, "free queue: block 2 follows 0 but points to 1"),
        (_make_circle, "free queue"),
        (_drop_from_index, "1 blocks have content but the index knows 0"),
        (_mislead_index, "index of group 0 leads to block 2"),
        (_cache_null, "the null block"),
        (_misplace_cached, "cached block before an empty one"),
    ],
)
def test_damage_is_found_and_named(damage, message):
    pool = BlockPool(6)
    pool.take(1)
    pool.register(1, 0, b"x")
    pool.check_integrity({1: 1})
    damage(pool)
    with pytest.raises(IntegrityError, match=message):
        pool.check_integrity({1: 1})
