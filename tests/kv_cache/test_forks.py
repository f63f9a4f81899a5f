"""Forks: sequences that share the blocks of another, with copy-on-write of the last one."""

from __future__ import annotations

import pytest

PROMPT = list(range(100, 116))  # 4 blocks of 4


def test_fork_shares_full_blocks_and_copies_the_last(make_harness, sequence):
    harness = make_harness(num_blocks=17)
    manager = harness.manager
    parent = harness.run("a", PROMPT[:10])
    child = sequence("b", list(PROMPT[:10]))
    ((source, target),) = manager.fork(parent, child, 9)
    mine, its = manager.block_ids(parent)[0], manager.block_ids(child)[0]
    assert its[:2] == mine[:2]
    assert (source, target) == (mine[2], its[2])
    assert manager.capacity(child) == 12
    manager.check_integrity()
    manager.free(parent)
    manager.check_integrity()
    child.token_ids += [1, 2]
    manager.commit(child, 12)
    assert harness.hit([*PROMPT[:10], 1, 2, 3]) == 12
    manager.free(child)
    assert manager.num_free_blocks == 16


def test_fork_on_a_block_border_copies_nothing(make_harness, sequence):
    harness = make_harness()
    parent, child = harness.run("a", PROMPT[:8]), sequence("b", PROMPT[:8])
    assert harness.manager.fork(parent, child, 8) == []
    assert harness.manager.capacity(child) == 8
    assert harness.manager.fork(parent, sequence("c", PROMPT[:8]), 0) == []
    harness.manager.check_integrity()


def test_fork_is_atomic_and_checked(make_harness, sequence):
    harness = make_harness(num_blocks=4)
    parent, child = harness.run("a", PROMPT[:10]), sequence("b", PROMPT[:10])
    assert harness.manager.fork(parent, child, 9) is None
    assert harness.manager.capacity(child) == 0
    with pytest.raises(ValueError, match="cannot be forked at 11 tokens, 10 are committed"):
        harness.manager.fork(parent, child, 11)
    with pytest.raises(ValueError, match="sequence b has no blocks"):
        harness.manager.fork(child, parent, 1)
    assert harness.manager.fork(parent, child, 8) == []
    with pytest.raises(ValueError, match="has blocks already"):
        harness.manager.fork(parent, child, 8)
    harness.manager.check_integrity()


@pytest.mark.parametrize("window", [1, 2, 4, 5, 8, 13])
@pytest.mark.parametrize("length", range(14, 26))
def test_fork_one_token_back_works_in_any_window(make_harness, sequence, window, length):
    """n > 1: every child computes the last prompt token again, right after the parent's prefill."""
    harness = make_harness(num_blocks=65, windows=(None, window))
    parent = harness.run("a", list(range(length)))
    copies = harness.manager.fork(parent, sequence("b", list(range(length))), length - 1)
    assert copies is not None
    assert len(copies) == (2 if (length - 1) % 4 else 0)
    harness.manager.check_integrity()


def test_fork_is_refused_when_the_window_has_moved_on(make_harness, sequence):
    harness = make_harness(num_blocks=65, windows=(None, 6))
    parent = harness.run("a", list(range(32)))
    free = harness.manager.num_free_blocks
    assert harness.manager.fork(parent, sequence("b", list(range(32))), 12) is None
    assert harness.manager.num_free_blocks == free
