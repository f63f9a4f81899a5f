"""What goes to the host tier, and from there to files; and what waits until there is room for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from llmkit.hookspecs.connector import SchedulerContext, StepView, TransferReport
from llmkit_connectors.offload.block_key import BlockKey
from llmkit_connectors.offload.host_index import HostBlock, HostIndex
from llmkit_connectors.offload.options import OffloadOptions
from llmkit_connectors.offload.orders import StoredBlock, StoreOrder, WriteOrder

_BLOCKS_PER_ORDER = 16

T = TypeVar("T")

CachedBlock = Callable[[int, bytes], int | None]
"""`StepView.cached_block`."""


@dataclass(slots=True)
class _UnderWay:
    """Host blocks by the id that is released when something is done with them."""

    hosts: dict[int, list[HostBlock]] = field(default_factory=dict)
    num_blocks: int = 0

    def begin(self, hold_id: int, hosts: list[HostBlock]) -> None:
        self.hosts[hold_id] = hosts
        self.num_blocks += len(hosts)

    def end(self, hold_id: int) -> list[HostBlock]:
        hosts = self.hosts.pop(hold_id, [])
        self.num_blocks -= len(hosts)
        return hosts


class Stores:
    """A block that cannot be copied at once, because as many are under way as may be, waits for as long as the cache
    has it; one that cannot be written at once, for as long as the host tier has it. That bounds both queues. What a
    load has brought from a file is not stored again when it comes into the cache.

    counts: gets "stored", "dropped" (left the cache before there was room, or its copy failed) and "dropped_writes"
    (the same of the host tier and files).
    """

    def __init__(
        self,
        context: SchedulerContext,
        options: OffloadOptions,
        index: HostIndex,
        counts: Counter[str],
        *,
        has_files: bool,
    ) -> None:
        self._new_id = context.new_id
        self._index = index
        self._counts = counts
        self._has_files = has_files
        self._num_cache_blocks = context.layout.num_blocks
        self._most_copies = min(options.max_pending_blocks, context.max_held_blocks)
        # What is being written cannot leave the host tier: half of it stays for what comes.
        self._most_writes = max(1, min(options.max_pending_blocks, index.num_slots // 2))
        self._copying = _UnderWay()
        self._writing = _UnderWay()
        self._uncopied: dict[BlockKey, bytes | None] = {}  # in the order of filling; the hash of the block before it
        self._unwritten: dict[BlockKey, HostBlock] = {}
        self._from_files: dict[BlockKey, None] = {}  # loaded, the oldest first, and not in the cache yet
        self._blocked = False

    @property
    def has_more(self) -> bool:
        """Whether anything waits for room."""
        return bool(self._uncopied or self._unwritten)

    def plan(self, step: StepView) -> tuple[list[StoreOrder], list[WriteOrder], Mapping[int, Sequence[int]]]:
        """What begins with `step`, and the holds for it."""
        holds: dict[int, Sequence[int]] = {}
        writes = [self._write(some, holds) for some in _cut(self._next_to_write())]
        for block in sorted(step.filled, key=lambda block: block.group):
            key = BlockKey(block.group, block.block_hash)
            if key in self._from_files:
                del self._from_files[key]
            else:
                self._uncopied[key] = None if self._has_files else block.parent_hash
        if len(self._uncopied) > 2 * self._num_cache_blocks:
            self._forget_uncached(step.cached_block)
        stores = [self._copy(some, holds) for some in _cut(self._next_to_copy(step.cached_block))]
        return stores, writes, holds

    def update(self, report: TransferReport) -> None:
        """Copies and writes that are done."""
        for hold_id in report.released:
            failed = hold_id in report.failed_holds
            for host in self._copying.end(hold_id):
                if failed:
                    self._index.fail(host)
                    self._counts["dropped"] += 1
                else:
                    host.ready = True
                self._index.release(host)
            written = self._writing.end(hold_id)
            self._counts["dropped_writes"] += failed * len(written)
            for host in written:
                self._index.release(host)
        if report.released:
            self.slots_are_free()

    def loaded_from_file(self, key: BlockKey) -> None:
        """The block is a file, and about to be in the cache: where the host tier had no slot for it, it would only push
        out others that are on their way, one for every block of a long prompt. A load that nobody waits for any more
        leaves its keys behind, so the oldest go."""
        self._from_files[key] = None
        if len(self._from_files) > self._num_cache_blocks:
            del self._from_files[next(iter(self._from_files))]

    def slots_are_free(self) -> None:
        """Transfers have ended that used slots: what found none may look again."""
        self._blocked = False

    def clear(self) -> None:
        """What waits is not to be stored any more."""
        self._uncopied.clear()
        self._unwritten.clear()
        self._from_files.clear()

    def stats(self) -> dict[str, int]:
        return {
            "pending_stores": self._copying.num_blocks,
            "pending_writes": self._writing.num_blocks,
            "waiting_stores": len(self._uncopied),
            "waiting_writes": len(self._unwritten),
        }

    # Copies to the host tier

    def _next_to_copy(self, cached_block: CachedBlock) -> list[tuple[int, HostBlock]]:
        """Blocks of the cache that are to be copied now, and where to."""
        taken: list[tuple[int, HostBlock]] = []
        while self._uncopied and not self._blocked and self._copying.num_blocks + len(taken) < self._most_copies:
            key, parent_hash = next(iter(self._uncopied.items()))
            if self._index.find(key) is None:
                block = cached_block(*key)
                host = None if block is None else self._index.reserve(key, parent_hash)
                if block is not None and host is not None:
                    taken.append((block, host))
                elif block is not None and self._may_find_a_slot_later(key, parent_hash):
                    self._blocked = True
                    break
                else:
                    self._counts["dropped"] += 1
            del self._uncopied[key]
        self._counts["stored"] += len(taken)
        return taken

    def _may_find_a_slot_later(self, key: BlockKey, parent_hash: bytes | None) -> bool:
        return self._index.num_busy > 0 and not self._index.lacks_parent(key, parent_hash)

    def _copy(self, some: Sequence[tuple[int, HostBlock]], holds: dict[int, Sequence[int]]) -> StoreOrder:
        hosts = [host for _, host in some]
        hold_id, write_id = self._new_id(), None
        self._copying.begin(hold_id, hosts)
        holds[hold_id] = [block for block, _ in some]
        if self._has_files and not self._unwritten and self._may_write(len(hosts)):
            write_id = self._begin_write(hosts, holds)
        elif self._has_files:
            self._unwritten.update((host.key, host) for host in hosts)
        return StoreOrder(hold_id, write_id, tuple(StoredBlock(host.key, block, host.slot) for block, host in some))

    def _forget_uncached(self, cached_block: CachedBlock) -> None:
        kept = {key: parent for key, parent in self._uncopied.items() if cached_block(*key) is not None}
        self._counts["dropped"] += len(self._uncopied) - len(kept)
        self._uncopied = kept

    # Writes to files

    def _may_write(self, num_blocks: int) -> bool:
        return not self._writing.num_blocks or self._writing.num_blocks + num_blocks <= self._most_writes

    def _next_to_write(self) -> list[HostBlock]:
        """Blocks of the host tier that were copied without being written, as many as may be written now."""
        taken: list[HostBlock] = []
        while self._unwritten and self._writing.num_blocks + len(taken) < self._most_writes:
            key, host = next(iter(self._unwritten.items()))
            if self._index.find(key) is not host:
                self._counts["dropped_writes"] += 1
            elif host.ready:
                taken.append(host)
            else:
                break
            del self._unwritten[key]
        return taken

    def _write(self, hosts: Sequence[HostBlock], holds: dict[int, Sequence[int]]) -> WriteOrder:
        return WriteOrder(self._begin_write(hosts, holds), tuple((host.key, host.slot) for host in hosts))

    def _begin_write(self, hosts: Iterable[HostBlock], holds: dict[int, Sequence[int]]) -> int:
        """Keep the blocks in their slots until they have been written."""
        write_id = self._new_id()
        self._writing.begin(write_id, list(hosts))
        holds[write_id] = []
        for host in hosts:
            self._index.acquire(host)
        return write_id


def _cut(items: Sequence[T]) -> list[Sequence[T]]:
    return [items[start : start + _BLOCKS_PER_ORDER] for start in range(0, len(items), _BLOCKS_PER_ORDER)]
