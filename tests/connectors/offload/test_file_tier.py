from __future__ import annotations

import errno
import logging
import os
import random
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmkit_connectors.offload.block_file import header_bytes
from llmkit_connectors.offload.block_key import space_of
from llmkit_connectors.offload.file_tier import FileTier, StoreOutcome
from llmkit_connectors.offload.folder import Folder
from llmkit_connectors.offload.media import Medium, open_medium

STORED, THERE = StoreOutcome.STORED, StoreOutcome.THERE
SKIPPED, FAILED = StoreOutcome.SKIPPED, StoreOutcome.FAILED


class Tier:
    """A tier with a limit in blocks, and short ways to use it."""

    def __init__(self, blocks: Any, medium: Medium, limit: int | None, clock: Callable[[], float]) -> None:
        self.blocks = blocks
        self.file_bytes = blocks.size + header_bytes(blocks.size)
        self.tier = FileTier(medium, None if limit is None else limit * self.file_bytes, clock)

    def store(self, number: int, space: bytes | None = None) -> StoreOutcome:
        key = self.blocks.key(number)
        return self.tier.store(space or self.blocks.space, key, memoryview(self.blocks.payload(key)))

    def load(self, number: int, space: bytes | None = None) -> bool:
        """Whether the block is there; its bytes must be right then."""
        key = self.blocks.key(number)
        out = bytearray(self.blocks.size)
        found = self.tier.load(space or self.blocks.space, key, memoryview(out))
        assert not found or out == self.blocks.payload(key)
        return found

    def contains(self, number: int) -> bool:
        return bool(self.find([number]))

    def find(self, numbers: Iterable[int], spaces: tuple[bytes, ...] = (), **how: Any) -> list[int]:
        hashes = [self.blocks.key(number).content_hash for number in numbers]
        found = self.tier.find(spaces or (self.blocks.space,), 0, hashes, **how)
        return [int.from_bytes(one, "big") for one in found]


@pytest.fixture
def open_tier(blocks: Any, tmp_path: Path, clock: Any) -> Callable[..., Tier]:
    def open_it(limit: int | None = None, medium: Medium | None = None) -> Tier:
        return Tier(blocks, medium or Folder(str(tmp_path)), limit, clock)

    return open_it


def block_files(folder: Path) -> list[Path]:
    return list(folder.rglob("*.kv"))


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_what_is_stored_comes_back_after_a_restart(open_tier: Any):
    tier = open_tier()
    assert not tier.contains(1)
    assert not tier.load(1)
    assert tier.store(1) is STORED
    assert tier.store(1) is THERE
    for one in (tier, open_tier()):
        assert one.contains(1)
        assert one.load(1)
        assert not one.load(2)
    stats = tier.tier.stats()
    assert (stats.hits, stats.misses, stats.stored, stats.already_there) == (1, 2, 1, 1)
    assert (stats.bytes_read, stats.bytes_written, stats.num_files) == (1000, 1000, 1)


def test_changes_of_the_numbers_are_told_once(open_tier: Any):
    tier = open_tier(limit=2)
    assert tier.tier.take_changes() == {}
    for number in range(3):
        tier.store(number)
    changes = tier.tier.take_changes()
    assert (changes["stored"], changes["evicted"], changes["num_files"]) == (3, 1, 2)
    assert tier.tier.take_changes() == {}
    tier.store(4)
    assert tier.load(4)
    assert tier.tier.take_changes() == {"stored": 1, "evicted": 1, "bytes_written": 1000, "hits": 1, "bytes_read": 1000}
    assert tier.tier.stats().num_files == 2


def test_a_search_ends_at_the_first_gap_if_it_is_told_so(open_tier: Any, blocks: Any):
    tier = open_tier()
    for number in [*range(40), *range(50, 90)]:
        tier.store(number)
    assert tier.find(range(100)) == [*range(40), *range(50, 90)]
    assert tier.find(range(100), only_leading=True) == list(range(40))
    assert tier.find(range(60, 70), only_leading=True) == list(range(60, 70))
    assert tier.find(range(45, 55), only_leading=True) == []
    other = space_of("a model", 1, 2)
    tier.store(1, other)
    assert tier.find(range(3), (blocks.space, other)) == [1]


def test_blocks_of_another_model_rank_or_epoch_are_not_found(open_tier: Any):
    tier = open_tier()
    tier.store(1)
    others = [("another", 0, 1, b""), ("a model", 1, 2, b""), ("a model", 0, 2, b""), ("a model", 0, 1, b"x")]
    for other in others:
        assert not tier.load(1, space_of(*other))
    assert tier.load(1)


def test_a_file_under_the_name_of_another_block_is_refused_and_removed(open_tier: Any, tmp_path: Path):
    tier = open_tier()
    tier.store(1)
    tier.store(2)
    one, two = sorted(block_files(tmp_path))
    two.write_bytes(one.read_bytes())
    assert not tier.load(2)
    assert not two.exists()
    assert tier.load(1)


@pytest.mark.parametrize("damage", ["cut", "empty", "longer", "flipped", "zeros"])
def test_what_is_not_whole_is_a_miss_and_is_removed(open_tier: Any, tmp_path: Path, damage: str):
    tier = open_tier()
    tier.store(1)
    [path] = block_files(tmp_path)
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[700] ^= 4
    path.write_bytes(
        {"cut": data[:600], "empty": b"", "longer": data + b"x", "flipped": data, "zeros": bytes(len(data))}[damage]
    )
    assert not tier.load(1)
    assert not path.exists()
    assert tier.tier.stats().damaged == 1
    assert tier.store(1) is STORED
    assert tier.load(1)


# B68: a limit of three blocks, files that vanish, threads that evict and load the same keys.


def test_the_limit_holds_at_every_moment(open_tier: Any, tmp_path: Path):
    tier = open_tier(limit=3)
    for number in range(10):
        assert tier.store(number) is STORED
        assert size_of(tmp_path) <= 3 * tier.file_bytes
    assert [n for n in range(10) if tier.load(n)] == [7, 8, 9]
    assert tier.tier.stats().evicted == 7


def test_what_was_used_last_stays(open_tier: Any):
    tier = open_tier(limit=3)
    for number in (0, 1, 2):
        tier.store(number)
    assert tier.load(0)
    assert tier.store(1) is THERE
    tier.store(3)
    assert [n for n in range(4) if tier.load(n)] == [0, 1, 3]


def test_a_file_that_vanishes_between_look_up_and_load_is_a_miss(open_tier: Any, tmp_path: Path):
    tier = open_tier(limit=3)
    tier.store(1)
    assert tier.contains(1)
    block_files(tmp_path)[0].unlink()
    assert not tier.load(1)
    stats = tier.tier.stats()
    assert (stats.num_files, stats.num_bytes, stats.damaged) == (0, 0, 0)


def test_a_block_larger_than_the_limit_is_skipped(open_tier: Any, tmp_path: Path):
    tier = open_tier(limit=0)
    assert tier.store(1) is SKIPPED
    assert size_of(tmp_path) == 0


def test_threads_that_evict_and_load_the_same_keys(open_tier: Any, tmp_path: Path):
    tier = open_tier(limit=3)
    found = []
    scale = 10 if os.environ.get("LLMKIT_DEEP_TESTS") else 1

    def store(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(300 * scale):
            assert tier.store(choose.randrange(6)) in (STORED, THERE, FAILED, SKIPPED)

    def load(seed: int) -> None:
        choose = random.Random(seed)
        found.append(sum(tier.load(choose.randrange(6)) for _ in range(1000 * scale)))

    errors: list[BaseException] = []
    hook, threading.excepthook = threading.excepthook, lambda args: errors.append(args.exc_value)
    try:
        threads = [threading.Thread(target=run, args=(i,)) for i, run in enumerate((store, store, load, load))]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert sum(path_size(path) for path in tmp_path.rglob("*")) <= 4 * tier.file_bytes
        for thread in threads:
            thread.join()
    finally:
        threading.excepthook = hook
    assert errors == []
    assert sum(found) > 0
    stats = tier.tier.stats()
    assert stats.num_files == len(block_files(tmp_path)) <= 3
    assert stats.num_bytes == size_of(tmp_path)
    assert stats.damaged == 0


def path_size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0


# B70: old files count, a full or read-only storage, no leftovers.


def test_old_files_count_after_a_restart(open_tier: Any, tmp_path: Path):
    tier = open_tier(limit=8)
    for number in range(8):
        tier.store(number)
        os.utime(max(block_files(tmp_path), key=lambda path: path.stat().st_mtime_ns), (number, number))
    restarted = open_tier(limit=5)
    assert restarted.store(8) is STORED
    assert size_of(tmp_path) <= 5 * tier.file_bytes
    assert [n for n in range(9) if restarted.contains(n)] == [4, 5, 6, 7, 8]
    assert restarted.tier.stats().num_files == 5


def test_only_its_own_files_are_counted_and_removed(open_tier: Any, tmp_path: Path):
    (tmp_path / "notes.kv").write_bytes(bytes(10_000))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "model.safetensors").write_bytes(bytes(10_000))
    tier = open_tier(limit=1)
    assert tier.store(1) is STORED
    assert tier.store(2) is STORED
    assert tier.tier.stats().num_files == 1
    assert (tmp_path / "notes.kv").exists()
    assert (tmp_path / "sub" / "model.safetensors").exists()


def test_what_other_processes_add_is_counted_from_the_next_listing_on(open_tier: Any, clock: Any):
    mine, other = open_tier(limit=4), open_tier(limit=None)
    mine.store(0)
    for number in (1, 2, 3, 4, 5):
        other.store(number)
    clock.now += 61
    mine.store(6)
    assert mine.tier.stats().num_files == 4
    assert mine.contains(6)


class FullFolder(Folder):
    """A folder whose disk is full, or that may only be read."""

    problem: OSError | None = None

    def write(self, name: str, parts: Any) -> None:
        if self.problem is not None:
            raise self.problem
        super().write(name, parts)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_what_cannot_be_stored_is_skipped_with_one_warning(
    open_tier: Any, tmp_path: Path, clock: Any, caplog: pytest.LogCaptureFixture, code: int
):
    folder = FullFolder(str(tmp_path))
    tier = open_tier(limit=10, medium=folder)
    tier.store(0)
    folder.problem = OSError(code, os.strerror(code))
    with caplog.at_level(logging.WARNING):
        outcomes = [tier.store(number) for number in range(1, 6)]
        clock.now += 1.5
        outcomes += [tier.store(number) for number in range(1, 6)]
        clock.now += 1.5  # the pause has become longer
        outcomes += [tier.store(1)]
    assert outcomes == [FAILED, *[SKIPPED] * 4, FAILED, *[SKIPPED] * 4, SKIPPED]
    assert len(caplog.records) == 1
    assert os.strerror(code) in caplog.text
    assert (tier.tier.stats().failed, tier.tier.stats().skipped) == (2, 9)
    assert tier.load(0)
    folder.problem = None
    clock.now += 100
    assert tier.store(1) is STORED
    assert tier.tier.stats().num_bytes == size_of(tmp_path) == 2 * tier.file_bytes


def test_what_cannot_be_removed_stops_storing_and_is_still_counted(open_tier: Any, tmp_path: Path, clock: Any):
    class Stuck(Folder):
        def remove(self, name: str) -> None:
            raise PermissionError(name)

    tier = open_tier(limit=2, medium=Stuck(str(tmp_path)))
    tier.store(0)
    tier.store(1)
    assert tier.store(2) is FAILED
    assert tier.tier.stats().num_bytes == size_of(tmp_path) == 2 * tier.file_bytes
    clock.now += 10
    assert tier.store(3) is FAILED
    assert tier.load(0)
    assert tier.load(1)


def test_a_place_that_is_no_folder_is_a_miss_and_a_skipped_store(open_tier: Any, tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    tier = open_tier(limit=3, medium=Folder(str(tmp_path / "file" / "cache")))
    assert tier.store(1) is FAILED
    assert not tier.contains(1)
    assert not tier.load(1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB; skips where none may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(small_disk: Path, blocks: Any, caplog: pytest.LogCaptureFixture):
    now = [0.0]
    tier = FileTier(Folder(str(small_disk)), None, lambda: now[0])
    payload = memoryview(bytes(300_000))
    outcomes = []
    with caplog.at_level(logging.WARNING):
        for number in range(30):
            now[0] += 100
            outcomes.append(tier.store(blocks.space, blocks.key(number), payload))
    assert outcomes == [STORED] * 13 + [FAILED] * 17
    assert "No space left" in caplog.text
    assert list(small_disk.rglob(".tmp*")) == []
    assert len(block_files(small_disk)) == 13
    assert tier.load(blocks.space, blocks.key(3), memoryview(bytearray(300_000)))


# Other media


def test_memory_works_like_a_folder(open_tier: Any, tmp_path: Path):
    url = f"memory://{tmp_path.name}"
    tier = open_tier(limit=3, medium=open_medium(url, {}))
    for number in range(5):
        assert tier.store(number) is STORED
    assert [n for n in range(5) if tier.load(n)] == [2, 3, 4]
    again = open_tier(limit=2, medium=open_medium(url, {}))
    assert again.store(9) is STORED
    assert again.contains(9)
    assert again.tier.stats().num_files == 2


@pytest.mark.parametrize("url", ["nosuchscheme://x", "nosuchscheme://"])
def test_an_unknown_scheme_is_refused(url: str):
    with pytest.raises(ValueError, match="nosuchscheme"):
        open_medium(url, {})
