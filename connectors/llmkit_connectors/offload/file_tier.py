"""The file tier: blocks as files in a folder or an object store, which outlive the process and are shared with
others."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from llmkit.errors import described
from llmkit_connectors.offload import block_file
from llmkit_connectors.offload.block_file import DamagedBlock
from llmkit_connectors.offload.block_key import BlockKey
from llmkit_connectors.offload.file_index import FileIndex
from llmkit_connectors.offload.media import Medium
from llmkit_connectors.offload.quiet_log import QuietLog

logger = logging.getLogger("llmkit.connectors.offload")

_BLOCK_NAME = re.compile(r"^[0-9a-f]{32}/[0-9a-f]{2}/[0-9a-f]{64}-\d+\.kv$")  # nothing else is counted or removed
_ASKED_AT_ONCE = 32
_RELIST_S = 60.0
_RELIST_SHARE = 0.05  # of the time: listing a large bucket takes minutes, and must not be all that is done
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class StoreOutcome(Enum):
    """What became of a block that was to be stored. SKIPPED: not tried, because storing has just failed, or because the
    block is larger than the limit."""

    STORED = "stored"
    THERE = "there"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(slots=True)
class FileTierStats:
    """Counts since the tier was opened, in blocks and bytes of payload; num_files and num_bytes are what is known to be
    there now, headers included."""

    hits: int = 0
    misses: int = 0
    damaged: int = 0
    stored: int = 0
    already_there: int = 0
    skipped: int = 0
    failed: int = 0
    evicted: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    num_files: int = 0
    num_bytes: int = 0


class FileTier:
    """Files under a medium, one a block, named by content. All methods may be called from several threads, and none
    raises for what the storage does: a block that cannot be read is a miss, one that cannot be written is not stored.

    A block is named by its space, KV group and content hash. A space is 32 bytes that stand for everything besides
    the tokens that the bytes of a block depend on (see `space_of`); it is part of the file's name and header, so a
    block of another model is never even looked at. limit_bytes: most bytes of all files under the medium, those of
    other spaces included; None for no limit. Processes that share a medium need no lock: contents of a name never
    differ, files appear whole and may vanish at any time. Each keeps the limit by what it has listed, at least once a
    minute (less often where a listing takes long), so together they may exceed it by what they write in between.
    """

    def __init__(self, medium: Medium, limit_bytes: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._medium = medium
        self._limit = limit_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._index = FileIndex()
        self._reserved = 0  # bytes of files that are being written
        self._stats = FileTierStats()
        self._changes: Counter[str] = Counter()
        self._listing = threading.Lock()
        self._relist_at = float("-inf")
        self._pause_until = float("-inf")
        self._pause_s = _FIRST_PAUSE_S
        self._log = QuietLog(logger)

    def find(
        self, spaces: Sequence[bytes], group: int, hashes: Sequence[bytes], *, only_leading: bool = False
    ) -> list[bytes]:
        """Those of `hashes` whose blocks are there now, in all of `spaces`; asks the storage. only_leading: only
        those before the first that is missing. What cannot be found out is not there."""
        found: list[bytes] = []
        start, step = (
            0,
            1 if only_leading else _ASKED_AT_ONCE,
        )  # mostly, the first one already tells that there is nothing
        try:
            while start < len(hashes):
                some = hashes[start : start + step]
                there = self._are_there(spaces, group, some)
                found += [one for one, is_there in zip(some, there, strict=True) if is_there]
                if only_leading and not all(there):
                    return found[: start + there.index(False)]
                start, step = start + step, _ASKED_AT_ONCE
        except Exception as error:
            self._log.warning(f"{self._medium.url} cannot be searched for stored KV blocks: {described(error)}")
        return found

    def _are_there(self, spaces: Sequence[bytes], group: int, hashes: Sequence[bytes]) -> list[bool]:
        names = [_name(space, BlockKey(group, one)) for space in spaces for one in hashes]
        there = self._medium.exist(names)
        return [all(there[i :: len(hashes)]) for i in range(len(hashes))]

    def load(self, space: bytes, key: BlockKey, out: memoryview) -> bool:
        """Fill `out` with the block's payload, exactly as long as that. False, with anything in `out`, if it is not
        there or not whole; what is not whole is removed."""
        name = _name(space, key)
        header = memoryview(bytearray(block_file.header_bytes(out.nbytes)))
        try:
            size = self._medium.read_into(name, (header, out))
            if size != header.nbytes + out.nbytes:
                raise DamagedBlock(f"it has {size} bytes instead of {header.nbytes + out.nbytes}")
            block_file.check(header, out, space, key.content_hash)
        except FileNotFoundError:
            self._forget(name)
            self._count(misses=1)
            return False
        except DamagedBlock as error:
            self._log.warning(f"The stored KV block {name} in {self._medium.url} is of no use and is removed: {error}.")
            self._count(misses=1, damaged=1)
            self._remove(name)
            return False
        except Exception as error:
            self._log.warning(f"A stored KV block in {self._medium.url} cannot be read: {described(error)}")
            self._count(misses=1)
            return False
        self._used(name, size)
        self._count(hits=1, bytes_read=out.nbytes)
        return True

    def store(self, space: bytes, key: BlockKey, payload: memoryview) -> StoreOutcome:
        """Write a block unless it is there already, after removing as many old ones as the limit demands."""
        if self._clock() < self._pause_until:
            self._count(skipped=1)
            return StoreOutcome.SKIPPED
        try:
            outcome = self._store(space, key, payload)
        except Exception as error:
            self._pause()
            self._log.warning(
                f"KV blocks cannot be stored in {self._medium.url} and are skipped for now: {described(error)}"
            )
            self._count(failed=1)
            return StoreOutcome.FAILED
        if outcome is StoreOutcome.STORED:
            self._pause_s = _FIRST_PAUSE_S
            self._count(stored=1, bytes_written=payload.nbytes)
        elif outcome is StoreOutcome.THERE:
            self._count(already_there=1)
        else:
            self._count(skipped=1)
        return outcome

    def stats(self) -> FileTierStats:
        """A snapshot of the numbers."""
        with self._lock:
            self._stats.num_files, self._stats.num_bytes = len(self._index), self._index.num_bytes
            return replace(self._stats)

    def take_changes(self) -> dict[str, int]:
        """How the numbers have changed since the last call, by name; costs next to nothing if they have not."""
        with self._lock:
            self._changes["num_files"] += len(self._index) - self._stats.num_files
            self._changes["num_bytes"] += self._index.num_bytes - self._stats.num_bytes
            self._stats.num_files, self._stats.num_bytes = len(self._index), self._index.num_bytes
            if not any(self._changes.values()):
                return {}
            changes, self._changes = self._changes, Counter()
        return {name: change for name, change in changes.items() if change}

    # Steps of the above

    def _store(self, space: bytes, key: BlockKey, payload: memoryview) -> StoreOutcome:
        name = _name(space, key)
        self._list_if_due()
        if self._medium.exists(name):
            size = block_file.header_bytes(payload.nbytes) + payload.nbytes
            self._used(name, size)
            return StoreOutcome.THERE
        header = block_file.make_header(space, key.content_hash, payload)
        size = len(header) + payload.nbytes
        if self._limit is not None and size > self._limit:
            return StoreOutcome.SKIPPED
        self._reserve(size)
        try:
            self._medium.write(name, (header, payload))
            with self._lock:
                self._index.add(name, size, time.time())
        finally:
            with self._lock:
                self._reserved -= size
        return StoreOutcome.STORED

    def _reserve(self, size: int) -> None:
        """Count `size` bytes as taken, once enough old files have been removed. Raises what a removal raises."""
        while True:
            with self._lock:
                taken = self._index.num_bytes + self._reserved
                if self._limit is None or taken + size <= self._limit:
                    self._reserved += size
                    return
                victim = self._index.oldest()
                if victim is None:
                    raise OSError("the limit is taken up by files that are being written")
                freed = self._index.drop(victim)
                self._reserved += freed  # until it is really gone
            try:
                self._medium.remove(victim)
            except Exception:
                with self._lock:
                    self._index.add(victim, freed, time.time())  # as the youngest, so that others are tried next
                raise
            finally:
                with self._lock:
                    self._reserved -= freed
            self._count(evicted=1)

    def _list_if_due(self) -> None:
        """Bring the index up to date with the storage, if the last time is long ago; one thread does it at a time."""
        if self._clock() < self._relist_at:
            return
        with self._listing:
            started = self._clock()
            if started < self._relist_at:
                return
            self._medium.sweep()
            if self._limit is None:
                self._relist_at = float("inf")
                return
            with self._lock:
                self._index.listing_begins()
            listed = [file for file in self._medium.files() if _BLOCK_NAME.match(file.name)]
            with self._lock:
                self._index.relist(listed)
            finished = self._clock()
            self._relist_at = finished + max(_RELIST_S, (finished - started) / _RELIST_SHARE)

    def _used(self, name: str, size: int) -> None:
        with self._lock:
            if name in self._index:
                self._index.use(name, time.time())
            else:
                self._index.add(name, size, time.time())
        try:
            self._medium.touch(name)
        except Exception as error:  # a folder that may only be read
            logger.debug("the time of use of %s cannot be noted: %s", name, described(error))

    def _remove(self, name: str) -> None:
        try:
            self._medium.remove(name)
        except Exception as error:
            self._log.warning(f"A damaged KV block in {self._medium.url} cannot be removed: {described(error)}")
            return
        self._forget(name)

    def _forget(self, name: str) -> None:
        with self._lock:
            self._index.drop(name)

    def _pause(self) -> None:
        with self._lock:
            self._pause_until = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _count(self, **more: int) -> None:
        with self._lock:
            self._changes.update(more)
            for name, number in more.items():
                setattr(self._stats, name, getattr(self._stats, name) + number)


def _name(space: bytes, key: BlockKey) -> str:
    digest = key.content_hash.hex()
    return f"{space.hex()[:32]}/{digest[:2]}/{digest}-{key.group}.kv"
