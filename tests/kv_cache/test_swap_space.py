"""Blocks that go to the host and come back."""

from __future__ import annotations

import pytest

from llmkit.kv_cache.events import BlockStored
from llmkit.kv_cache.hashing import BlockHasher
from llmkit.kv_cache.sequence_blocks import SequenceBlocks
from llmkit.kv_cache.swap_space import SwapSpace

PREFIX = [1, 2, 3, 4, 5, 6, 7, 8]


def copies(harness):
    harness.manager.check_integrity()
    return harness.manager.swap_space.take_copies()


def state_of(*tables, committed=0, chain=None):
    length = 4 * len(tables[0])
    return SequenceBlocks(tuple(map(list, tables)), length, length, committed, [0] * len(tables), chain)


class TestOut:
    def test_blocks_are_given_back_and_copied_by_the_next_plan(self, make_harness):
        run = make_harness(num_host_blocks=4)
        seq = run.run("a", [*PREFIX, 9])
        blocks = run.manager.block_ids(seq)[0]
        assert run.manager.swap_out(seq, 9)
        assert run.manager.num_free_blocks == run.manager.num_blocks
        assert copies(run) == (list(zip(blocks, [0, 1, 2], strict=True)), [])
        assert copies(run) == ([], [])

    def test_only_what_has_been_computed_is_copied(self, make_harness):
        run = make_harness(num_host_blocks=4)
        seq = run.run("a", [1, 2, 3])
        run.manager.allocate(seq, 14)
        assert run.manager.swap_out(seq, 7)  # a step in flight has computed four more
        assert len(copies(run)[0]) == 2

    def test_without_room_nothing_happens(self, make_harness):
        run = make_harness(num_host_blocks=2)
        seq = run.run("a", [*PREFIX, 9])
        assert not run.manager.swap_out(seq, 9)
        assert len(run.manager.block_ids(seq)[0]) == 3
        assert copies(run) == ([], [])

    def test_what_a_window_has_left_is_not_copied(self, make_harness):
        run = make_harness(windows=(None, 3), num_blocks=20, num_host_blocks=9)
        seq = run.run("a", [*PREFIX, *PREFIX])
        assert run.manager.swap_out(seq, 16)
        assert len(copies(run)[0]) == 4 + 1

    def test_known_content_is_kept_once(self, make_harness):
        run = make_harness(num_blocks=20, num_host_blocks=5)
        first, second = run.run("a", [*PREFIX, 9]), run.run("b", [*PREFIX, 10])
        assert run.manager.swap_out(first, 9)
        assert run.manager.swap_out(second, 9)
        assert len(copies(run)[0]) == 4
        run.manager.swap_space.drop("a")
        assert run.manager.swap_space.num_free == 2  # the shared blocks stay with b
        run.manager.swap_space.drop("b")
        assert run.manager.swap_space.num_free == 5
        run.manager.check_integrity()

    def test_a_sequence_that_ends_at_once_is_not_copied(self, make_harness):
        run = make_harness(num_host_blocks=4)
        run.manager.swap_out(run.run("a", PREFIX), 8)
        run.manager.swap_space.drop("a")
        assert copies(run) == ([], [])

    def test_twice_is_an_error(self):
        space = SwapSpace(4)
        space.store("a", state_of([5, 6]), 8, 4)
        with pytest.raises(ValueError, match="already"):
            space.store("a", state_of([5, 6]), 8, 4)


class TestBack:
    def test_blocks_that_are_still_cached_are_shared_instead_of_copied(self, make_harness):
        run = make_harness(num_blocks=20, num_host_blocks=9)
        seq = run.run("a", [*PREFIX, 9])
        before = run.manager.block_ids(seq)[0]
        run.manager.swap_out(seq, 9)
        copies(run)
        assert run.manager.swap_in(seq, 10)
        after = run.manager.block_ids(seq)[0]
        assert after[:2] == before[:2]
        assert copies(run) == ([], [(after[2], 2)])
        assert run.manager.swap_space.num_free == 9

    def test_blocks_that_are_gone_come_from_the_host_and_become_findable_again(self, make_harness):
        events = []
        run = make_harness(num_blocks=9, num_host_blocks=9, on_event=events.append)
        seq = run.run("a", [*PREFIX, 9])
        run.manager.swap_out(seq, 9)
        copies(run)
        run.finish("other", [20 + i for i in range(32)])  # takes every block
        assert run.hit([*PREFIX, 9]) == 0
        assert run.manager.swap_in(seq, 10)
        table = run.manager.block_ids(seq)[0]
        assert copies(run) == ([], [(table[0], 0), (table[1], 1), (table[2], 2)])
        assert run.hit([*PREFIX, 9]) == 0  # not before the step that carries the copies has been done
        events.clear()
        run.manager.commit(seq, 10)
        assert run.hit([*PREFIX, 9]) == 8
        assert [(type(event), len(event.block_hashes)) for event in events] == [(BlockStored, 2)]
        run.manager.check_integrity()

    def test_a_fork_before_the_next_commit(self, make_harness, sequence):
        """Of what was swapped out before its commit: the fork shares blocks that become findable while it has them."""
        run = make_harness(num_blocks=9, num_host_blocks=9)
        seq = sequence("a", [*PREFIX, 9])
        assert run.manager.allocate(seq, 9) is not None
        run.manager.swap_out(seq, 9)
        copies(run)
        assert run.manager.swap_in(seq, 9)
        copies(run)
        child = sequence("b", [*PREFIX, 10])
        assert run.manager.fork(seq, child, 8) == []
        assert run.hit([*PREFIX, 9]) == 0  # the step that carries the copies has not been done
        run.manager.commit(seq, 9)
        run.manager.check_integrity()
        assert run.hit([*PREFIX, 9]) == 8

    def test_a_fork_offers_what_its_parent_did_not(self, make_harness, sequence):
        run = make_harness(num_blocks=9, num_host_blocks=9)
        seq = run.run("a", [*PREFIX, 9])
        run.manager.swap_out(seq, 9)
        copies(run)
        run.finish("other", [20 + i for i in range(32)])  # takes every block
        assert run.manager.swap_in(seq, 9)
        copies(run)
        child = sequence("b", [*PREFIX, 10])
        assert run.manager.fork(seq, child, 8) == []
        run.manager.free(seq)
        assert run.manager.next_commit(child) == 0
        run.manager.commit(child, 8)
        run.manager.check_integrity()
        assert run.hit([*PREFIX, 9]) == 8

    def test_not_enough_free_blocks(self, make_harness):
        run = make_harness(num_blocks=5, num_host_blocks=9)
        seq = run.run("a", [*PREFIX, 9])
        run.manager.swap_out(seq, 9)
        copies(run)
        other = run.run("b", [7] * 8)
        assert not run.manager.swap_in(seq, 9)
        run.manager.free(other)
        assert run.manager.swap_in(seq, 9)
        copies(run)

    def test_a_sequence_that_is_not_there(self, make_harness, sequence):
        run = make_harness(num_host_blocks=9)
        with pytest.raises(ValueError, match="has not been swapped out"):
            run.manager.swap_in(sequence("a", [1]), 1)

    def test_a_host_block_that_a_plan_reads_is_not_written_by_it(self):
        space = SwapSpace(2)
        space.store("a", state_of([5, 6]), 8, 4)
        space.take_copies()
        space.load("a", [(7, 0), (8, 1)])
        assert not space.store("b", state_of([9]), 4, 4)
        assert space.take_copies() == ([], [(7, 0), (8, 1)])
        assert space.store("b", state_of([9]), 4, 4)
        space.check_integrity()

    def test_out_and_back_in_one_plan(self):
        space = SwapSpace(2)
        space.store("a", state_of([5, 6]), 8, 4)
        space.load("a", [(7, 0), (8, 1)])
        space.check_integrity()
        assert space.take_copies() == ([(5, 0), (6, 1)], [(7, 0), (8, 1)])
        assert space.num_free == 2

    def test_a_shared_block_that_is_read_rests_whoever_drops_it(self):
        chain = BlockHasher(4).chain()
        chain.extend(PREFIX, 2)
        space = SwapSpace(3)
        space.store("a", state_of([5, 6], committed=2, chain=chain), 8, 4)
        space.store("b", state_of([5, 6], committed=2, chain=chain), 8, 4)
        space.take_copies()
        space.load("a", [(7, 0), (8, 1)])
        space.drop("b")
        space.check_integrity()
        assert space.num_free == 1
        space.take_copies()
        assert space.num_free == 3


def test_the_cache_is_not_reset_while_a_sequence_is_on_the_host(make_harness):
    run = make_harness(num_host_blocks=9)
    run.manager.swap_out(run.run("a", PREFIX), 8)
    assert not run.manager.reset_prefix_cache()
    run.manager.swap_space.drop("a")
    assert run.manager.reset_prefix_cache()
