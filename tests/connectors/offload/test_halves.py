"""Both halves together, driven by a small stand-in for the engine."""

from __future__ import annotations

import os
import pickle
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmkit.hookspecs.connector import Load
from llmkit.kv_cache.layout import KVCacheLayout, KVGroup, KVSpec
from llmkit_connectors.offload.file_tier import FileTier

MakeRig = Callable[..., Any]
PROMPT = list(range(1, 42))  # ten full blocks of four tokens, and one token


def block_files(folder: Path) -> list[Path]:
    return list(folder.rglob("*.kv"))


def test_what_was_computed_once_is_loaded_from_memory(make_rig: MakeRig):
    rig = make_rig()
    assert rig.serve(PROMPT) == 0
    assert rig.serve(PROMPT) == 40
    assert rig.serve([*PROMPT[:17], 99, 98, 97, 96]) == 16
    assert rig.serve([*PROMPT, 50, 51, 52]) == 40
    assert rig.serve([7, *PROMPT]) == 0


def test_one_token_is_always_left_to_compute(make_rig: MakeRig):
    rig = make_rig()
    rig.serve(PROMPT[:40])
    assert rig.serve(PROMPT[:40]) == 36
    assert rig.serve(PROMPT[:4]) == 0


def test_what_the_cache_has_is_not_offered(make_rig: MakeRig):
    rig = make_rig()
    rig.serve(PROMPT)
    assert rig.offer(rig.sequence(PROMPT), num_cached=40) == 0
    assert rig.offer(rig.sequence(PROMPT), num_cached=28) == 12


@pytest.mark.parametrize("place", ["folder", "memory"])
def test_files_outlive_the_engine(make_rig: MakeRig, tmp_path: Path, place: str):
    url = str(tmp_path) if place == "folder" else f"memory://{tmp_path.name}"
    first = make_rig(url=url)
    first.serve(PROMPT)
    first.close()
    second = make_rig(url=url)
    assert second.serve(PROMPT) == 40
    assert second.worker._files.stats().hits == 10
    assert second.serve(PROMPT) == 40  # from memory now
    assert second.worker._files.stats().hits == 10


def test_engines_share_a_folder_while_they_run(make_rig: MakeRig, tmp_path: Path):
    one, two = make_rig(url=str(tmp_path)), make_rig(url=str(tmp_path))
    one.serve(PROMPT)
    assert two.serve([*PROMPT, 1, 2, 3, 4, 5, 6, 7]) == 40
    assert one.serve([*PROMPT, 1, 2, 3, 4, 5, 6, 7]) == 44


def test_another_model_finds_nothing(make_rig: MakeRig, tmp_path: Path):
    make_rig(url=str(tmp_path)).serve(PROMPT)
    assert make_rig(url=str(tmp_path), fingerprint="another").serve(PROMPT) == 0


def test_a_tier_that_is_too_small_stores_the_head_and_says_so(make_rig: MakeRig):
    rig = make_rig(host_blocks=2)
    for loaded in (0, 8, 8):
        assert rig.serve(PROMPT) == loaded
    assert rig.scheduler.stats()["dropped"] == 24


def test_with_files_behind_it_a_small_tier_stores_all_of_a_long_sequence(make_rig: MakeRig, tmp_path: Path):
    rig = make_rig(host_blocks=4, url=str(tmp_path))
    sequence = rig.sequence(PROMPT)
    sequence.tables = [[rig.take() for _ in range(10)]]
    for column in range(10):  # a step each
        rig.compute(sequence, column, column + 1)
        rig.settle()
    assert rig.serve(PROMPT) == 40


SMALL_CACHE = KVCacheLayout((KVGroup(KVSpec(2, 8, torch.float32), (0,)),), num_blocks=13, block_size=4, page_size=4)


def test_no_more_blocks_are_held_than_the_engine_allows_and_what_leaves_the_cache_meanwhile_is_dropped(
    make_rig: MakeRig,
):
    rig = make_rig(layout=SMALL_CACHE)
    rig.serve(PROMPT)  # the rig checks it
    assert rig.scheduler.stats()["dropped"] == 4
    assert rig.serve(PROMPT) == 24


def test_what_stays_in_the_cache_is_stored_when_there_is_room(make_rig: MakeRig):
    rig = make_rig(layout=SMALL_CACHE)
    sequence = rig.sequence(PROMPT)
    sequence.tables = [[rig.take() for _ in range(10)]]
    rig.kept = set(sequence.tables[0])
    rig.compute(sequence, 0)
    stats = rig.scheduler.stats()
    assert (stats["pending_stores"], stats["waiting_stores"]) == (6, 4)
    rig.settle()
    stats = rig.scheduler.stats()
    assert (stats["stored"], stats["dropped"], stats["waiting_stores"]) == (10, 0, 0)
    rig.kept = set()
    rig.finish(sequence)
    assert rig.serve(PROMPT) == 40


def test_a_block_that_comes_back_while_it_waits_is_stored_once(make_rig: MakeRig):
    rig = make_rig(layout=SMALL_CACHE)
    sequence = rig.sequence(PROMPT)
    sequence.tables = [[rig.take() for _ in range(10)]]
    rig.kept = set(sequence.tables[0])
    rig.compute(sequence, 0)
    rig.compute(sequence, 6)  # evicted and computed again
    rig.settle()
    assert rig.scheduler.stats()["stored"] == 10
    rig.scheduler._index.check_integrity()


def test_what_waits_is_bounded_by_the_cache(make_rig: MakeRig):
    rig = make_rig(layout=SMALL_CACHE)
    blocked = threading.Event()
    rig.worker._copies.submit(blocked.wait)
    for first in range(50):
        sequence = rig.sequence([first, *PROMPT[:23]])
        sequence.tables = [[rig.take() for _ in range(6)]]
        rig.compute(sequence, 0)
        rig.finish(sequence)
        assert rig.scheduler.stats()["waiting_stores"] <= 2 * 13
    blocked.set()
    rig.settle()
    stats = rig.scheduler.stats()
    assert stats["stored"] + stats["dropped"] == 50 * 6


def test_what_waits_is_forgotten_by_a_reset(make_rig: MakeRig):
    rig = make_rig(layout=SMALL_CACHE)
    sequence = rig.sequence(PROMPT)
    sequence.tables = [[rig.take() for _ in range(10)]]
    rig.kept = set(sequence.tables[0])
    rig.compute(sequence, 0)
    rig.scheduler.reset()
    rig.settle()
    assert rig.scheduler.stats()["stored"] == 6
    assert rig.scheduler._index.num_used == 0


def test_numbers_of_both_halves(make_rig: MakeRig, tmp_path: Path):
    make_rig(url=str(tmp_path)).serve(PROMPT)
    rig = make_rig(url=str(tmp_path))
    assert set(rig.scheduler.stats().values()) == {0, 64}
    rig.serve([*PROMPT, 1, 2, 3])
    rig.serve([*PROMPT, 1, 2, 3])
    rig.take_report()
    stats = rig.scheduler.stats()
    shown = ("host_blocks", "host_blocks_used", "stored", "loaded_from_files", "loaded_from_memory", "pending_stores")
    assert [stats[name] for name in shown] == [64, 11, 1, 10, 10, 0]
    assert (stats["file_hits"], stats["file_stored"], stats["file_num_files"]) == (10, 1, 11)
    assert stats["file_bytes_read"] == 10 * rig.layout.block_bytes


def test_the_host_limit_is_exact_and_the_oldest_goes(make_rig: MakeRig):
    rig = make_rig(host_blocks=12)
    for first in (100, 200, 300):
        rig.serve([first, *PROMPT[:24]])
        assert rig.scheduler._index.num_used <= 12
    assert rig.serve([100, *PROMPT[:24]]) == 0  # and takes the place of 200
    assert rig.serve([300, *PROMPT[:24]]) == 24
    assert rig.serve([200, *PROMPT[:24]]) == 0
    assert len(rig.worker._contents) <= 12


def test_the_head_of_a_sequence_stays_longest(make_rig: MakeRig):
    rig = make_rig(host_blocks=12)
    rig.serve(PROMPT)
    rig.serve([100, *PROMPT[:19]])
    assert rig.serve(PROMPT) == 28


def test_a_file_that_vanished_is_a_failed_block_and_no_more(make_rig: MakeRig, tmp_path: Path):
    make_rig(url=str(tmp_path)).serve(PROMPT)
    rig = make_rig(url=str(tmp_path))
    sequence = rig.sequence(PROMPT)
    offer = rig.offer(sequence)
    gone = sequence.block_hashes()[6].hex()
    [path] = [path for path in block_files(tmp_path) if gone in path.name]
    path.unlink()
    sequence.tables = [[rig.take() for _ in range(10)]]
    assert offer == 40
    assert rig.load(sequence, offer) == 24
    assert rig.scheduler._counts["failed_loads"] == 1
    rig.compute(sequence, 6)
    rig.finish(sequence)
    rig.settle()
    assert rig.serve(PROMPT) == 40


def test_a_damaged_file_is_a_failed_block_and_is_replaced(make_rig: MakeRig, tmp_path: Path):
    make_rig(url=str(tmp_path)).serve(PROMPT)
    hashes = make_rig().sequence(PROMPT).block_hashes()
    [path] = [path for path in block_files(tmp_path) if hashes[3].hex() in path.name]
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    rig = make_rig(url=str(tmp_path))
    assert rig.serve(PROMPT) == 12
    assert rig.worker._files.stats().damaged == 1
    assert make_rig(url=str(tmp_path)).serve(PROMPT) == 40


def test_what_was_there_and_could_not_be_loaded_is_not_offered_again_for_a_while(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_rig(url=str(tmp_path)).serve(PROMPT)
    rig = make_rig(url=str(tmp_path))
    monkeypatch.setattr(FileTier, "load", lambda *_: False)
    assert rig.serve(PROMPT) == 0
    sequence = rig.sequence([*PROMPT, 1, 2, 3, 4])
    rig.scheduler.reset()  # what was computed is in memory
    rig.scheduler._epoch = b""
    rig.scheduler._spaces = rig.scheduler._spaces_of_workers()
    assert rig.offer(sequence) == 0
    assert len(block_files(tmp_path)) == 10


def test_nothing_is_loaded_from_a_slot_that_does_not_hold_the_block(make_rig: MakeRig):
    rig = make_rig()
    rig.serve(PROMPT)
    rig.worker._contents.clear()
    assert rig.serve(PROMPT) == 0
    assert rig.serve(PROMPT) == 40


def test_a_copy_that_fails_is_not_stored(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    rig = make_rig(url=str(tmp_path))

    def fail(*_: Any) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(rig.worker._cache, "save", fail)
        rig.serve(PROMPT)
    assert block_files(tmp_path) == []
    assert rig.serve(PROMPT) == 0
    assert rig.serve(PROMPT) == 40


def test_a_reset_disowns_memory_and_files(make_rig: MakeRig, tmp_path: Path):
    rig = make_rig(url=str(tmp_path))
    rig.serve(PROMPT)
    rig.scheduler.reset()
    assert rig.serve(PROMPT) == 0
    assert rig.serve(PROMPT) == 40
    assert len(block_files(tmp_path)) == 20


def test_a_cancelled_load_is_reported_and_its_slots_are_free_again(make_rig: MakeRig, tmp_path: Path):
    make_rig(url=str(tmp_path)).serve(PROMPT)
    rig = make_rig(url=str(tmp_path), host_blocks=10)
    blocked = threading.Event()
    for _ in range(2):  # both threads
        rig.worker._loads.submit(blocked.wait)
    sequence = rig.sequence(PROMPT)
    offer = rig.offer(sequence)
    sequence.tables = [[rig.take() for _ in range(10)]]
    rig.plan(loads=[Load(77, sequence, 0, offer, (tuple(sequence.tables[0]),), True)])
    rig.take_report()
    assert 77 not in rig.ended
    rig.worker.cancel([77, 78])
    blocked.set()
    rig.until(lambda: 77 in rig.ended)
    assert rig.failed == set(sequence.tables[0])
    assert rig.worker._files.stats().hits == 0
    rig.finish(sequence)
    rig.scheduler._index.check_integrity()
    assert rig.scheduler._index.num_used == 0


def test_storing_waits_for_nobody(make_rig: MakeRig):
    rig = make_rig()
    blocked = threading.Event()
    rig.worker._copies.submit(blocked.wait)
    rig.serve(PROMPT, settle=False)  # would stand still if a step waited for the copy
    assert rig.serve(PROMPT, settle=False) == 0
    blocked.set()
    rig.settle()
    assert rig.serve(PROMPT) == 40


@pytest.mark.parametrize(("host_blocks", "num_dropped"), [(64, 0), (24, 6)])
def test_files_that_are_not_written_fast_enough_are_written_later_unless_their_slots_are_needed(
    make_rig: MakeRig, tmp_path: Path, host_blocks: int, num_dropped: int
):
    rig = make_rig(url=str(tmp_path), max_pending_blocks=10, host_blocks=host_blocks)
    blocked = threading.Event()
    rig.worker._writes.submit(blocked.wait)
    rig.serve(PROMPT, settle=False)
    for first in (100, 200):
        rig.until(lambda: sum(map(len, rig.holds.values())) == 0)  # copied, not written
        rig.serve([first, *PROMPT], settle=False)
    stats = rig.scheduler.stats()
    assert (stats["dropped_writes"], stats["waiting_writes"]) == (0, 20)
    blocked.set()
    rig.settle()
    stats = rig.scheduler.stats()
    assert (stats["dropped_writes"], stats["waiting_writes"]) == (num_dropped, 0)
    assert len(block_files(tmp_path)) == 30 - num_dropped
    assert rig.serve([200, *PROMPT]) == 40


def test_a_copy_that_fails_is_not_offered(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch):
    rig = make_rig()
    with monkeypatch.context() as patch:
        patch.setattr(rig.worker._cache, "save", lambda *_: 1 / 0)
        rig.serve(PROMPT)
    assert rig.offer(rig.sequence(PROMPT)) == 0
    assert rig.scheduler.stats()["dropped"] == 10


def test_what_killed_engines_left_is_removed_also_without_a_limit(make_rig: MakeRig, tmp_path: Path):
    rest = tmp_path / "llmkit-kv" / ".tmp-00000000-1-1"
    rest.parent.mkdir()
    rest.write_bytes(b"x")
    os.utime(rest, (0, 0))
    make_rig(url=str(tmp_path)).serve(PROMPT)
    assert not rest.exists()


def test_what_is_under_way_is_stored_when_the_engine_closes(make_rig: MakeRig, tmp_path: Path):
    rig = make_rig(url=str(tmp_path))
    rig.serve(PROMPT, settle=False)
    rig.close()
    rig.close()
    assert make_rig(url=str(tmp_path)).serve(PROMPT) == 40


def test_orders_pickle(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch):
    rig = make_rig()
    start = rig.worker.start_load
    monkeypatch.setattr(rig.worker, "start_load", lambda payload: start(pickle.loads(pickle.dumps(payload))))
    rig.serve(PROMPT)
    assert rig.serve(PROMPT) == 40


def window_layout() -> KVCacheLayout:
    full = KVSpec(2, 8, torch.float32)
    window = KVSpec(2, 8, torch.float32, sliding_window=9)
    groups = (KVGroup(full, (0, 2)), KVGroup(window, (1, 3)))
    return KVCacheLayout(groups, num_blocks=200, block_size=4, page_size=4)


@pytest.mark.parametrize("from_file", [False, True])
def test_layers_with_a_sliding_window_need_only_what_they_see(make_rig: MakeRig, tmp_path: Path, from_file: bool):
    url = str(tmp_path) if from_file else None
    first = make_rig(layout=window_layout(), url=url)
    assert first.serve(PROMPT) == 0
    rig = make_rig(layout=window_layout(), url=url) if from_file else first
    assert rig.serve(PROMPT) == 40
    # What the window has left need not be there.
    hashes = rig.sequence(PROMPT).block_hashes()
    for content_hash in hashes[:7]:
        for path in block_files(tmp_path):
            if path.name == f"{content_hash.hex()}-1.kv":
                path.unlink()
    rig = make_rig(layout=window_layout(), url=url) if from_file else first
    sequence = rig.sequence(PROMPT)
    sequence.tables = [[rig.take() for _ in range(10)], [0] * 8 + [rig.take() for _ in range(2)]]
    assert rig.offer(sequence) == 40
    assert rig.load(sequence, 40) == 40
    if from_file:
        shorter = PROMPT[:33]
        assert rig.offer(rig.sequence(shorter)) == 0


@pytest.mark.parametrize("eviction", ["lru", "arc"])
def test_ten_thousand_random_operations_without_a_wrong_byte(make_rig: MakeRig, tmp_path: Path, eviction: str):
    """Store, load, evict, damage, remove, crash and restart; the rig checks every byte that is loaded."""
    deep = bool(os.environ.get("LLMKIT_DEEP_TESTS"))
    choose = random.Random(eviction)
    settings = {"url": str(tmp_path), "host_blocks": 20, "file_blocks": 60, "eviction": eviction}
    rig = make_rig(**settings)
    num_operations = num_loaded = 0
    while num_operations < (10_000 if deep else 800):
        stem = [choose.randrange(6) + 1] * 9
        tokens = stem + [choose.randrange(3) for _ in range(choose.randrange(0, 30))]
        num_loaded += rig.serve(tokens, settle=choose.random() < 0.5)
        num_operations += 1 + len(tokens) // 4
        event = choose.random()
        files = block_files(tmp_path) if event < 0.2 else []
        if files and event < 0.1:
            choose.choice(files).unlink(missing_ok=True)
        elif files and event < 0.2:
            damage(choose.choice(files), choose)
        elif event < 0.23:
            rig = make_rig(**settings)  # the other one goes on writing what it has begun
        elif event < 0.25:
            rig.scheduler.reset()
        assert rig.scheduler._index.num_used <= 20
        rig.scheduler._index.check_integrity()
    rig.settle()
    assert num_loaded > num_operations // 2
    stats = rig.worker._files.stats()
    assert stats.num_bytes <= 60 * (rig.layout.block_bytes + 100)
    assert not list(tmp_path.rglob(".tmp*"))


def damage(path: Path, choose: random.Random) -> None:
    """Flip a bit, or cut the file."""
    try:
        data = bytearray(path.read_bytes())
    except FileNotFoundError:
        return
    if choose.random() < 0.5:
        data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    else:
        del data[choose.randrange(len(data)) :]
    path.write_bytes(data)
