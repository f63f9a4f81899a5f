from __future__ import annotations

import itertools

import pytest

from llmkit.kv_cache.block_pool import NULL_BLOCK
from llmkit.kv_cache.groups import NEVER, FullAttentionManager, SlidingWindowManager, make_group_managers

HASHES = [bytes([i]) for i in range(12)]


def index_of(*columns: int) -> dict[bytes, int]:
    return {HASHES[column]: column + 100 for column in columns}


def test_full_attention_keeps_everything():
    group = FullAttentionManager(0, 4)
    assert group.first_needed(1000) == group.first_kept(1000) == 0
    assert group.next_release(0) == NEVER
    assert [group.peak_blocks(n, 1) for n in (1, 4, 5, 16)] == [1, 1, 2, 4]


def test_full_attention_hit_ends_at_the_first_gap():
    group = FullAttentionManager(0, 4)
    assert group.longest_hit(HASHES, index_of(0, 1, 3, 4), 5) == 2
    assert group.longest_hit(HASHES, index_of(0, 1, 3, 4), 1) == 1
    assert group.longest_hit(HASHES, {}, 5) == 0
    assert group.hit_blocks(HASHES, index_of(0, 1, 2), 2) == [100, 101]


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 7, 8, 9, 16, 40])
def test_window_needs_exactly_the_positions_it_sees(window):
    group = SlidingWindowManager(0, 4, window)
    for computed in range(48):
        seen = {p // 4 for p in range(max(0, computed - window + 1), computed)}
        needed = set(range(group.first_needed(computed), -(-computed // 4)))
        assert seen <= needed
        assert len(needed - seen) <= 1, "only a block that is about to be filled may be extra"


@pytest.mark.parametrize("window", [1, 2, 4, 5, 8, 9])
def test_window_hit_is_the_longest_possible(window):
    group = SlidingWindowManager(0, 4, window)
    for present in itertools.product((False, True), repeat=7):
        index = index_of(*(column for column in range(7) if present[column]))
        possible = [end for end in range(8) if all(present[c] for c in range(group.first_needed(end * 4), end))]
        assert group.longest_hit(HASHES, index, 7) == max(possible)


def test_window_hit_has_null_where_nothing_is_needed():
    group = SlidingWindowManager(0, 4, 5)
    assert group.longest_hit(HASHES, index_of(4), 5) == 5
    assert group.hit_blocks(HASHES, index_of(4), 5) == [NULL_BLOCK] * 4 + [104]


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
def test_release_points_and_kept_columns_agree(window):
    group = SlidingWindowManager(0, 4, window)
    for computed in range(1, 60):
        kept, before = group.first_kept(computed), group.first_kept(computed - 1)
        assert (kept > before) == (computed >= group.next_release(before))
        assert kept <= group.first_needed(computed - 1), "a fork one token back finds its blocks"


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("step", [1, 2, 3, 4, 7, 16])
def test_peak_is_never_exceeded(window, step):
    group = SlidingWindowManager(0, 4, window)
    for total in range(1, 40):
        for start in range(step):
            computed, most = 0, 0
            while computed < total:
                allocated = min(total, computed + (step if computed or not start else start))
                most = max(most, -(-allocated // 4) - group.first_kept(computed))
                computed = allocated
            assert most <= group.peak_blocks(total, step)


def test_managers_of_a_layout(make_layout):
    layout = make_layout(windows=(None, 7))
    full, sliding = make_group_managers(layout.groups, 4)
    assert isinstance(full, FullAttentionManager)
    assert isinstance(sliding, SlidingWindowManager)
    assert (sliding.group, sliding.window) == (1, 7)
    with pytest.raises(ValueError, match="sliding window of KV group 0"):
        make_group_managers(make_layout(windows=(0,)).groups, 4)
