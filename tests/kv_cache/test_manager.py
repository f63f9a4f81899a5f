from __future__ import annotations

import hashlib

import pytest

from llmkit.kv_cache import hashing, prefix_cache
from llmkit.kv_cache.block_pool import IntegrityError
from llmkit.kv_cache.hashing import ExtraKey

PROMPT = list(range(100, 116))  # 4 blocks of 4


# Allocation


def test_tables_grow_by_whole_blocks(make_harness, sequence):
    manager = make_harness().manager
    seq = sequence("a", PROMPT)
    assert manager.needs_block(seq, 1)
    assert manager.capacity(seq) == 0
    (update,) = manager.allocate(seq, 5)
    assert (update[0], update[1], len(update[2])) == (0, 0, 2)
    assert manager.allocate(seq, 8) == []
    assert not manager.needs_block(seq, 8)
    assert manager.capacity(seq) == 8
    ((group, start, blocks),) = manager.allocate(seq, 9)
    assert (group, start) == (0, 2)
    assert manager.block_ids(seq) == (update[2] + blocks,)
    assert manager.num_free_blocks == 5
    assert manager.usage == pytest.approx(3 / 8)


def test_allocate_is_atomic(make_harness, sequence):
    manager = make_harness(num_blocks=6, windows=(None, None)).manager
    seq, other = sequence("a", PROMPT), sequence("b", PROMPT)
    assert manager.allocate(seq, 12) is None
    assert (manager.num_free_blocks, manager.capacity(seq)) == (5, 0)
    assert manager.allocate(seq, 8) is not None
    before = manager.block_ids(seq)
    assert manager.allocate(seq, 9) is None
    assert manager.allocate(other, 1) is None
    assert manager.block_ids(seq) == before
    assert manager.num_free_blocks == 1
    manager.check_integrity()


def test_groups_get_blocks_of_their_own(make_harness, sequence):
    manager = make_harness(windows=(None, 6, 6)).manager
    updates = manager.allocate(sequence("a", PROMPT), 8)
    assert [group for group, _, _ in updates] == [0, 1, 2]
    assert len({block for _, _, blocks in updates for block in blocks}) == 6


def test_table_does_not_grow_beyond_max_model_len(make_harness, sequence):
    manager = make_harness(max_model_len=10, num_blocks=20).manager
    seq = sequence("a", PROMPT)
    assert manager.allocate(seq, 12) is not None
    with pytest.raises(ValueError, match="13 tokens are more than the 12"):
        manager.allocate(seq, 13)
    assert not manager.fits(13)


def test_a_model_without_attention_needs_no_blocks(make_harness, sequence):
    manager = make_harness(windows=()).manager
    seq = sequence("a", PROMPT)
    assert manager.lookup(seq).num_tokens == 0
    assert manager.allocate(seq, 16, manager.lookup(seq)) == []
    manager.commit(seq, 16)
    manager.free(seq)
    assert manager.num_free_blocks == 8


def test_b38_fits_tells_what_can_never_be_held(make_harness):
    manager = make_harness(num_blocks=9, block_size=16, max_model_len=512).manager
    assert manager.num_blocks == 8
    assert manager.fits(128)
    assert not manager.fits(129)
    assert not manager.fits(200)


@pytest.mark.parametrize("step", [1, 3, 4, 9])
def test_fits_counts_a_window_by_the_tokens_of_a_step(make_harness, sequence, step):
    """What `fits` promises can be computed to the end; one block less cannot always."""
    for num_blocks in range(2, 24):
        manager = make_harness(num_blocks=num_blocks, windows=(None, 6)).manager
        seq = sequence("a", list(range(40)))
        done = 0
        while done < 40:
            computed = min(40, done + step)
            if manager.allocate(seq, computed) is None:
                break
            manager.commit(seq, computed)
            done = computed
        assert done == 40 or not manager.fits(40, step)
        assert manager.fits(40) == (num_blocks - 1 >= 20)
    assert make_harness(num_blocks=16, windows=(None, 6)).manager.fits(40, 4)


# Prefix hits


def test_hit_is_capped_one_token_short(make_harness):
    harness = make_harness()
    harness.finish("a", PROMPT)
    assert harness.hit(PROMPT) == 12
    assert harness.hit([*PROMPT, 1]) == 16
    assert harness.hit(PROMPT[:13]) == 12
    assert harness.hit(PROMPT[:12]) == 8
    assert harness.hit(PROMPT[:4]) == 0
    assert harness.hit([]) == 0
    assert harness.hit([1, *PROMPT]) == 0


def test_hit_shares_blocks_and_lookup_touches_nothing(make_harness, sequence):
    harness = make_harness()
    manager = harness.manager
    first = harness.run("a", [*PROMPT, 1])
    seq = sequence("b", [*PROMPT, 2, 3])
    free = manager.num_free_blocks
    hit = manager.lookup(seq)
    assert manager.num_free_blocks == free
    assert hit.blocks == (manager.block_ids(first)[0][:4],)
    ((group, start, blocks),) = manager.allocate(seq, 18, hit)
    assert (group, start) == (0, 0)
    assert blocks[:4] == hit.blocks[0]
    assert manager.num_free_blocks == free - 1
    manager.free(first)
    manager.check_integrity()
    assert harness.hit([*PROMPT, 9]) == 16


def test_cached_blocks_of_the_hit_count_as_taken(make_harness, sequence):
    """The hit lies in the free queue: its blocks cannot also serve as the new ones."""
    harness = make_harness(num_blocks=5)
    harness.finish("a", PROMPT[:12])
    seq = sequence("b", [*PROMPT[:12], 1, 2, 3, 4, 5])
    hit = harness.manager.lookup(seq)
    assert hit.num_tokens == 12
    assert harness.manager.allocate(seq, 17, hit) is None
    assert harness.manager.allocate(seq, 16, hit) is not None
    harness.manager.check_integrity()


@pytest.mark.parametrize("windows", [(None,), (None, 100)])
def test_prefix_outlives_its_tail(make_harness, sequence, windows):
    harness = make_harness(num_blocks=1 + 4 * len(windows), windows=windows)
    harness.finish("a", PROMPT)
    assert harness.manager.num_free_blocks == 4 * len(windows)
    for columns, left in ((1, 12), (2, 8), (3, 4), (4, 0)):
        seq = sequence("b", [7] * 16)
        assert harness.manager.allocate(seq, columns * 4) is not None
        assert harness.hit([*PROMPT, 1]) == left
        harness.manager.free(seq)


def test_without_prefix_caching_nothing_is_hashed(make_harness, sequence, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("hashed")

    monkeypatch.setattr(hashing, "blake2b", refuse, raising=True)
    monkeypatch.setattr(hashing.HashChain, "extend", refuse)
    monkeypatch.setattr(hashing, "_digest", lambda *_: b"")
    harness = make_harness(prefix_caching=False)
    harness.finish("a", PROMPT)
    assert harness.hit([*PROMPT, 1]) == 0
    assert harness.manager.stats().num_cached == 0
    seq = sequence("b", PROMPT)
    harness.manager.allocate(seq, 16)
    assert harness.manager.next_commit(seq) > 2**60


def test_commit_hashes_every_block_once(make_harness, sequence, monkeypatch):
    calls = []
    original = hashlib.blake2b

    def counting(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    harness = make_harness()
    monkeypatch.setattr(hashing, "blake2b", counting)
    seq = sequence("a", list(PROMPT))
    for _ in range(3):
        hit = harness.manager.lookup(seq)
        harness.manager.free(seq)  # what a scheduler does when there was no room
    assert len(calls) == 3, "blocks 0..2; the last one cannot be hit"
    harness.manager.allocate(seq, 16, hit)
    for computed in range(17):
        harness.manager.commit(seq, computed)
    assert len(calls) == 4
    seq.token_ids += [1, 2, 3, 4]
    harness.manager.allocate(seq, 20)
    for computed in range(16, 21):
        harness.manager.commit(seq, computed)
    assert len(calls) == 5


def test_remembered_hashes_belong_to_the_token_list(make_harness, sequence):
    """The same id with other tokens must not get the old one's hit."""
    harness = make_harness(num_blocks=17)
    harness.finish("x", PROMPT)
    seq = sequence("a", [*PROMPT, 1])
    assert harness.manager.lookup(seq).num_tokens == 16
    assert harness.manager.lookup(sequence("a", [0, *PROMPT])).num_tokens == 0
    assert harness.manager.lookup(sequence("a", seq.token_ids, cache_salt="s")).num_tokens == 0
    assert harness.manager.lookup(seq).num_tokens == 16
    head = harness.manager._prefixes.chain(seq)
    for i in range(100):
        harness.manager.lookup(sequence(f"waiting {i}", [*PROMPT, i]))
        harness.manager.lookup(seq)
    assert harness.manager._prefixes.chain(seq) is head
    assert len(harness.manager._prefixes._known_chains) <= prefix_cache._REMEMBERED_CHAINS


def test_salt_and_keys_separate(make_harness):
    harness = make_harness(num_blocks=33)
    lora = (ExtraKey("lora", "poet"),)
    harness.finish("a", [*PROMPT, 1], cache_salt="tenant")
    harness.finish("b", [*PROMPT, 1], extra_keys=lora)
    tokens = [*PROMPT, 2]
    assert harness.hit(tokens) == 0
    assert harness.hit(tokens, cache_salt="other") == 0
    assert harness.hit(tokens, cache_salt="tenant") == 16
    assert harness.hit(tokens, extra_keys=lora) == 16
    assert harness.hit(tokens, cache_salt="tenant", extra_keys=lora) == 0


def test_stale_hit_is_refused(make_harness, sequence):
    harness = make_harness(num_blocks=5)
    harness.finish("a", PROMPT)
    seq, other = sequence("b", [*PROMPT[:8], 1]), sequence("c", [5] * 16)
    hit = harness.manager.lookup(seq)
    harness.manager.allocate(other, 16)
    harness.manager.free(other)
    with pytest.raises(ValueError, match="stale prefix hit"):
        harness.manager.allocate(seq, 9, hit)
    assert harness.manager.num_free_blocks == 4
    harness.manager.check_integrity()


def test_hit_in_the_wrong_place_is_refused(make_harness, sequence):
    harness = make_harness()
    seq = harness.run("a", [*PROMPT, 1])
    with pytest.raises(ValueError, match="has blocks already"):
        harness.manager.allocate(seq, 18, harness.manager.lookup(sequence("b", PROMPT)))
    other = sequence("c", [*PROMPT, 2])
    hit = harness.manager.lookup(other)
    with pytest.raises(ValueError, match="less than its prefix hit"):
        harness.manager.allocate(other, 8, hit)
    with pytest.raises(ValueError, match="prefix caching is off"):
        make_harness(prefix_caching=False).manager.allocate(other, 17, hit)


def test_recomputed_last_block_replaces_its_free_twin(make_harness):
    """A whole cached prompt computes its last block again; the cache must not lose or double it."""
    harness = make_harness()
    harness.finish("a", PROMPT)
    seq = harness.run("b", PROMPT)
    stats = harness.manager.stats()
    assert (stats.num_cached, stats.num_free) == (4, 4)
    harness.manager.free(seq)
    assert harness.hit([*PROMPT, 1]) == 16


def test_hit_must_suit_all_groups(make_harness, sequence):
    """Full attention has 4 blocks; the window group lost the ones its longer hits need."""
    harness = make_harness(num_blocks=33, windows=(None, 6))
    manager = harness.manager
    harness.finish("a", [*PROMPT, 1])
    hit = manager.lookup(sequence("b", [*PROMPT, 2]))
    assert hit.num_tokens == 16
    assert hit.blocks[1][:2] == [0, 0]
    assert all(hit.blocks[1][2:])
    index = manager._pool.indices[1]
    lost = index.pop(next(h for h, block in index.items() if block == hit.blocks[1][3]))
    manager._pool._hashes[lost] = None
    hit = manager.lookup(sequence("b", [*PROMPT, 2]))
    assert hit.num_tokens == 12
    assert [bool(block) for block in hit.blocks[1]] == [False, True, True]
    index.clear()
    assert manager.lookup(sequence("b", [*PROMPT, 2])).num_tokens == 0


def test_groups_are_asked_until_all_agree(make_harness, sequence):
    """The wider window shortens the hit; the narrower one has no block for that length and shortens it again."""
    harness = make_harness(num_blocks=33, windows=(5, 9))
    harness.finish("a", [*PROMPT, 1])
    pool = harness.manager._pool
    chain = harness.manager._prefixes.chain(sequence("b", PROMPT))
    chain.extend(PROMPT, 4)
    for group, lost in ((0, (0, 2)), (1, (3,))):
        for column in lost:
            block = pool.indices[group].pop(chain.hashes[column])
            pool._hashes[block] = None
    hit = harness.manager.lookup(sequence("c", [*PROMPT, 2]))
    assert hit.num_tokens == 8
    assert [[bool(block) for block in blocks] for blocks in hit.blocks] == [[False, True], [True, True]]


# Committing


def test_b36_blocks_are_findable_only_after_commit(make_harness, sequence):
    """A and B with the same 64-token prefix, budget 24, A aborted (or preempted) after its first chunk."""
    harness = make_harness(num_blocks=17, block_size=16)
    manager = harness.manager
    prompt = list(range(64))
    a, b = sequence("a", [*prompt, 1]), sequence("b", [*prompt, 2])
    assert manager.allocate(a, 24, manager.lookup(a)) is not None
    assert manager.lookup(b).num_tokens == 0, "allocated is not computed"
    manager.commit(a, 24)
    assert manager.lookup(b).num_tokens == 16, "the second block is half full"
    assert manager.allocate(a, 48) is not None
    assert manager.lookup(b).num_tokens == 16
    manager.free(a)
    assert harness.hit([*prompt, 3]) == 16
    harness.finish("b", [*prompt, 2])
    assert harness.hit([*prompt, 3]) == 64
    assert manager.num_free_blocks == 16
    manager.check_integrity()


def test_commit_checks_what_it_is_told(make_harness, sequence):
    manager = make_harness().manager
    seq = sequence("a", PROMPT[:6])
    with pytest.raises(ValueError, match="sequence a has no blocks"):
        manager.commit(seq, 1)
    manager.allocate(seq, 8)
    with pytest.raises(ValueError, match="9 tokens cannot be computed, its blocks hold 8"):
        manager.commit(seq, 9)
    with pytest.raises(ValueError, match="block 1 is not full"):
        manager.commit(seq, 8)


@pytest.mark.parametrize("windows", [(None,), (7,), (None, 5, 9)])
def test_commits_before_next_commit_change_nothing(make_harness, sequence, windows):
    """Skipping them gives the same tables and the same cache."""
    every, needed = make_harness(windows=windows, num_blocks=64), make_harness(windows=windows, num_blocks=64)
    seq = sequence("a", list(range(40)))
    for harness in (every, needed):
        harness.manager.allocate(seq, 40)
    for computed in range(41):
        every.manager.commit(seq, computed)
        if computed >= needed.manager.next_commit(seq):
            needed.manager.commit(seq, computed)
        assert every.manager.block_ids(seq) == needed.manager.block_ids(seq)
        assert every.manager.stats() == needed.manager.stats()


def test_window_group_frees_what_it_has_left(make_harness):
    harness = make_harness(num_blocks=33, windows=(None, 6))
    seq = harness.run("a", list(range(32)))
    full, sliding = harness.manager.block_ids(seq)
    assert all(full)
    assert [bool(block) for block in sliding] == [False] * 6 + [True] * 2
    assert harness.manager.num_free_blocks == 32 - 8 - 2
    harness.manager.free(seq)
    assert harness.manager.num_free_blocks == 32


# Reset, numbers, integrity


def test_reset_waits_for_blocks_in_use(make_harness, sequence):
    harness = make_harness()
    seq = harness.run("a", PROMPT)
    assert harness.manager.reset_prefix_cache() is False
    assert harness.hit([*PROMPT, 1]) == 16
    harness.manager.free(seq)
    waiting = sequence("b", [*PROMPT, 1])
    assert harness.manager.lookup(waiting).num_tokens == 16
    assert harness.manager.reset_prefix_cache() is True
    assert harness.manager.lookup(waiting).num_tokens == 0
    assert harness.manager.stats().num_cached == 0
    harness.manager.check_integrity()


def test_b66_only_first_admissions_enter_the_statistics(make_harness, sequence):
    harness = make_harness(num_blocks=17)
    manager = harness.manager
    seq = sequence("a", [*PROMPT, 1])
    manager.allocate(seq, 17, manager.lookup(seq))
    manager.commit(seq, 17)
    manager.free(seq)
    hit = manager.lookup(seq)
    assert hit.num_tokens == 16
    manager.allocate(seq, 17, hit, count_query=False)
    stats = manager.stats()
    assert (stats.prefix_queries, stats.prefix_query_tokens, stats.prefix_hit_tokens) == (1, 17, 0)
    harness.run("b", [*PROMPT, 2])
    stats = manager.stats()
    assert (stats.prefix_queries, stats.prefix_query_tokens, stats.prefix_hit_tokens) == (2, 34, 16)


def test_evictions_are_counted(make_harness):
    harness = make_harness(num_blocks=5)
    harness.finish("a", PROMPT)
    harness.finish("b", [3] * 16)
    assert harness.manager.stats().num_evictions == 4


def test_free_of_a_sequence_without_blocks_does_nothing(make_harness, sequence):
    harness = make_harness()
    seq = sequence("a", PROMPT)
    harness.manager.lookup(seq)
    harness.manager.free(seq)
    assert harness.manager.num_free_blocks == 8


def _steal(manager) -> None:
    manager._sequences["b"].tables[0][-1] = manager._sequences["a"].tables[0][-1]


def _cross_groups(manager) -> None:
    tables = manager._sequences["a"].tables
    tables[1][-1] = tables[0][-1]


def _shorten(manager) -> None:
    manager._sequences["a"].tables[0].pop()


def _punch_hole(manager) -> None:
    manager._sequences["a"].tables[0][1] = 0


def _publish_early(manager) -> None:
    state = manager._sequences["a"]
    manager._pool.register(state.tables[0][-1], 0, b"early")


def _rewrite_history(manager) -> None:
    manager._sequences["a"].chain.hashes[0] = b"other"


def _overrun(manager) -> None:
    manager._sequences["a"].num_computed = 1000


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_steal, r"block \d+ counts 1 references but 2 tables"),
        (_cross_groups, r"block \d+ is held by groups"),
        (_shorten, r"sequence a: group 0 has 2 columns, capacity is 12 tokens"),
        (_punch_hole, r"sequence a: group 0 has null columns \[1\]"),
        (_publish_early, r"sequence a: column 2 of group 0 is findable but only 2 blocks"),
        (_rewrite_history, r"sequence a: column 0 of group 0 is findable under another content's hash"),
        (_overrun, r"sequence a: 2 blocks committed, 1000 tokens computed, capacity 12"),
    ],
)
def test_damage_is_found_and_named(make_harness, damage, message):
    harness = make_harness(num_blocks=17, windows=(None, 64))
    harness.run("a", PROMPT[:10])
    harness.run("b", [1, 2, 3])
    damage(harness.manager)
    with pytest.raises(IntegrityError, match=message):
        harness.manager.check_integrity()
