"""The moving half: copies blocks between the cache, the slots and the files, in threads of its own."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from llmkit.errors import described
from llmkit.hookspecs.connector import TransferReport, WorkerConnector, WorkerContext
from llmkit_connectors.offload.background import Background
from llmkit_connectors.offload.block_key import BlockKey, space_of
from llmkit_connectors.offload.cache_blocks import BlockCopy, Bytes, CacheBlocks, cache_blocks
from llmkit_connectors.offload.file_tier import FileTier
from llmkit_connectors.offload.host_memory import HostMemory
from llmkit_connectors.offload.orders import (
    NO_SLOT,
    LoadedBlock,
    LoadOrder,
    Orders,
    StoredBlock,
    StoreOrder,
    WriteOrder,
)

if TYPE_CHECKING:
    import torch

    from llmkit.kv_cache.layout import KVCacheLayout
    from llmkit_connectors.offload.options import OffloadOptions

logger = logging.getLogger("llmkit.connectors.offload")

# Of a load: from memory, as many as one gather on the device needs to be worth it; from files, so few that all threads
# get some.
_FROM_MEMORY_PER_TASK, _FROM_FILES_PER_TASK = 16, 4
_CLOSING_S = 10.0


class OffloadWorker(WorkerConnector):
    """Owns the slots' bytes. Which slot holds what is decided by the scheduler half, which never lets two transfers
    use a slot for different blocks; `_contents` only makes sure that no slot is loaded from that does not hold the
    block."""

    def __init__(self, context: WorkerContext, options: OffloadOptions, files: FileTier | None) -> None:
        self._context = context
        self._options = options
        self._files = files
        self._contents: dict[int, BlockKey] = {}
        self._changed = threading.Condition()
        self._loaded: set[int] = set()
        self._released: set[int] = set()
        self._failed: set[int] = set()
        self._unstored: set[int] = set()
        self._parts_left: dict[int, int] = {}
        self._cancelled: set[int] = set()
        self._cache: CacheBlocks | None = None
        self._memory: HostMemory | None = None
        self._loads = Background("load", options.num_threads)
        self._copies = Background("store", 1)
        self._writes = Background("write", -(-options.num_threads // 2)) if files is not None else None

    def register(self, layout: KVCacheLayout, kv_caches: Sequence[torch.Tensor]) -> None:
        self._cache = cache_blocks(layout, kv_caches)
        self._memory = HostMemory(
            self._options.num_slots(max(self._cache.payload_bytes)),
            max(self._cache.payload_bytes),
            pinned=kv_caches[0].device.type == "cuda",
        )

    def start_load(self, payload: Any) -> None:
        orders: Orders = payload
        space = space_of(self._context.fingerprint, self._context.rank, self._context.world_size, orders.epoch)
        for load in orders.loads:
            self._start(load, space)
        for write in orders.writes:
            self._submit_write(write, space)
        for store in orders.stores:
            self._copies.submit(partial(self._store, store, space))

    def report(self) -> TransferReport:
        counts = {} if self._files is None else self._files.take_changes()
        with self._changed:
            loaded, self._loaded = self._loaded, set()
            released, self._released = self._released, set()
            unstored, self._unstored = self._unstored, set()
            # Those of loads that go on are told with their end.
            failed, self._failed = (self._failed, set()) if loaded else (set(), self._failed)
        return TransferReport(frozenset(loaded), frozenset(released), frozenset(failed), counts, frozenset(unstored))

    def cancel(self, load_ids: Collection[int]) -> None:
        with self._changed:
            self._cancelled.update(load_id for load_id in load_ids if load_id in self._parts_left)

    def wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._loaded or self._released, timeout=seconds)

    def close(self) -> None:
        with self._changed:
            self._cancelled.update(self._parts_left)
        self._loads.close(_CLOSING_S)
        dropped = self._copies.close(_CLOSING_S)
        if self._writes is not None:
            dropped += self._writes.close(_CLOSING_S)
        if dropped:
            logger.warning("the engine closed before %d batches of KV blocks were stored", dropped)
        if self._memory is not None:
            self._memory.close()
        self._cache = self._memory = None

    # Loads

    def _start(self, order: LoadOrder, space: bytes) -> None:
        parts = [
            part
            for (_, from_file), blocks in itertools.groupby(order.blocks, key=lambda b: (b.key.group, b.from_file))
            for part in _cut(tuple(blocks), _FROM_FILES_PER_TASK if from_file else _FROM_MEMORY_PER_TASK)
        ]
        with self._changed:
            if not parts:
                self._loaded.add(order.load_id)
                return
            self._parts_left[order.load_id] = len(parts)
        for part in parts:
            self._loads.submit(partial(self._load, order.load_id, part, space))

    def _load(self, load_id: int, blocks: tuple[LoadedBlock, ...], space: bytes) -> None:
        """Load some blocks, all of one KV group."""
        failed = {block.block_id for block in blocks}
        try:
            if load_id not in self._cancelled:
                failed -= self._fill(blocks, space)
        except Exception as error:
            logger.warning("KV blocks could not be loaded: %s", described(error))
        finally:
            with self._changed:
                self._failed |= failed
                self._parts_left[load_id] -= 1
                if not self._parts_left[load_id]:
                    del self._parts_left[load_id]
                    self._cancelled.discard(load_id)
                    self._loaded.add(load_id)
                    self._changed.notify_all()

    def _fill(self, blocks: tuple[LoadedBlock, ...], space: bytes) -> set[int]:
        """Bring what can be found into the cache; the allocation blocks that it was."""
        assert self._cache is not None
        group = blocks[0].key.group
        copies: list[BlockCopy] = []
        for block in blocks:
            payload = self._payload(block.slot, group)
            if block.from_file:
                if not self._read(block, payload, space):
                    continue
            elif self._contents.get(block.slot) != block.key:
                continue
            copies.append((block.block_id, payload))
        self._cache.restore(group, copies)
        return {block_id for block_id, _ in copies}

    def _read(self, block: LoadedBlock, payload: Bytes, space: bytes) -> bool:
        self._contents.pop(block.slot, None)
        if self._files is None or not self._files.load(space, block.key, payload.data):
            return False
        if block.slot != NO_SLOT:
            self._contents[block.slot] = block.key
        return True

    # Stores

    def _store(self, order: StoreOrder, space: bytes) -> None:
        assert self._cache is not None
        stored: list[StoredBlock] = []
        try:
            for group, blocks in itertools.groupby(order.blocks, key=lambda block: block.key.group):
                some = tuple(blocks)
                for block in some:
                    self._contents.pop(block.slot, None)
                self._cache.save(group, [(block.block_id, self._payload(block.slot, group)) for block in some])
                self._contents.update((block.slot, block.key) for block in some)
                stored += some
        except Exception as error:
            logger.warning("KV blocks could not be copied to host memory: %s", described(error))
        finally:
            self._release(order.hold_id, failed=len(stored) < len(order.blocks))
        if order.write_id is not None:
            self._submit_write(WriteOrder(order.write_id, tuple((b.key, b.slot) for b in stored)), space)

    def _submit_write(self, order: WriteOrder, space: bytes) -> None:
        if self._writes is None or not order.blocks:
            self._release(order.write_id)
        else:
            self._writes.submit(partial(self._write, order, space))

    def _write(self, order: WriteOrder, space: bytes) -> None:
        assert self._files is not None
        try:
            for key, slot in order.blocks:
                if self._contents.get(slot) == key:
                    self._files.store(space, key, self._payload(slot, key.group).data)
        finally:
            self._release(order.write_id)

    def _release(self, hold_id: int, *, failed: bool = False) -> None:
        with self._changed:
            self._released.add(hold_id)
            if failed:
                self._unstored.add(hold_id)
            self._changed.notify_all()

    def _payload(self, slot: int, group: int) -> Bytes:
        """The memory of a slot as far as a block of `group` fills it; memory of its own without a slot."""
        assert self._cache is not None
        assert self._memory is not None
        size = self._cache.payload_bytes[group]
        return np.empty(size, np.uint8) if slot == NO_SLOT else self._memory.slot(slot, size)


def _cut(blocks: tuple[LoadedBlock, ...], size: int) -> list[tuple[LoadedBlock, ...]]:
    return [blocks[start : start + size] for start in range(0, len(blocks), size)]
