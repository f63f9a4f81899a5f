"""The deciding half: what is loaded from where, what is stored, and the books of the host tier."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, fields

from llmkit.hookspecs.connector import (
    Load,
    LoadOffer,
    Retention,
    SchedulerConnector,
    SchedulerContext,
    StepView,
    TransferPlan,
    TransferReport,
    TransferView,
)
from llmkit.kv_cache.groups import loadable_blocks
from llmkit_connectors.offload.block_key import BlockKey, space_of
from llmkit_connectors.offload.file_tier import FileTierStats
from llmkit_connectors.offload.host_index import HostBlock, HostIndex
from llmkit_connectors.offload.lookups import FileLookups
from llmkit_connectors.offload.options import OffloadOptions
from llmkit_connectors.offload.orders import NO_SLOT, LoadedBlock, LoadOrder, Orders
from llmkit_connectors.offload.stores import Stores

_NOTHING = LoadOffer(0)
_COUNTED = ("stored", "dropped", "dropped_writes", "loaded_from_memory", "loaded_from_files", "failed_loads")


@dataclass(frozen=True, slots=True)
class _Loading:
    """A block on its way into the cache, and the host block that it comes from or also goes to."""

    order: LoadedBlock
    host: HostBlock | None


class _Available:
    """The contents of one KV group that can be loaded: ready in the host tier, or found as files."""

    def __init__(self, index: HostIndex, group: int, found: Container[bytes] = ()) -> None:
        self._index = index
        self._group = group
        self._found = found

    def __contains__(self, content_hash: object) -> bool:
        assert isinstance(content_hash, bytes)
        block = self._index.find(BlockKey(self._group, content_hash))
        return (block is not None and block.ready) or content_hash in self._found


class OffloadScheduler(SchedulerConnector):
    """Decides for all workers: every worker keeps its part of a block in the same slot."""

    def __init__(self, context: SchedulerContext, options: OffloadOptions, lookups: FileLookups | None) -> None:
        self._context = context
        self._layout = context.layout
        self._lookups = lookups
        self._index = HostIndex(options.num_slots(context.block_bytes or context.layout.block_bytes), options.eviction)
        self._epoch = b""
        self._spaces = self._spaces_of_workers()
        self._loading: dict[int, list[_Loading]] = {}
        self._failed: set[int] = set()
        self._counts: Counter[str] = Counter(dict.fromkeys(_COUNTED, 0))
        self._stores = Stores(context, options, self._index, self._counts, has_files=lookups is not None)
        if lookups is not None:
            self._counts.update({f"file_{field.name}": 0 for field in fields(FileTierStats)})

    # What can be loaded

    def offer(self, request: TransferView, num_computed_tokens: int) -> LoadOffer | None:
        size = self._layout.block_size
        cached, limit = num_computed_tokens // size, (request.num_tokens - 1) // size
        if limit <= cached:
            return _NOTHING
        if self._lookups is not None and self._lookups.is_pending(request.sequence_number):
            return None
        hashes = request.block_hashes(limit)
        groups = range(len(self._layout.groups))
        in_memory = [_Available(self._index, group) for group in groups]
        count = loadable_blocks(self._layout, hashes, cached, in_memory)
        if count < len(hashes) - cached and self._lookups is not None:
            found = self._lookups.ask(request.sequence_number, self._spaces, hashes[cached:])
            if found is None:
                return None
            anywhere = [_Available(self._index, group, found[group]) for group in groups]
            count = loadable_blocks(self._layout, hashes, cached, anywhere)
        return LoadOffer(count * size, asynchronous=True) if count else _NOTHING

    # What a step transfers

    def plan_transfers(self, step: StepView) -> TransferPlan | None:
        loads = tuple(self._load(load) for load in step.loads)
        stores, writes, holds = self._stores.plan(step)
        if not loads and not stores and not writes:
            return None
        return TransferPlan(Orders(self._epoch, tuple(stores), tuple(writes), loads), holds)

    def has_more_to_store(self) -> bool:
        return self._stores.has_more

    def _load(self, load: Load) -> LoadOrder:
        size = self._layout.block_size
        first, last = load.first_token // size, (load.first_token + load.num_tokens) // size
        hashes = load.request.block_hashes(last)
        wanted = [
            (BlockKey(group, hashes[column]), table[column])
            for group, table in enumerate(load.block_ids)
            for column in range(first, last)
            if table[column]
        ]
        loading = self._sources(wanted)
        self._loading[load.load_id] = loading
        if self._lookups is not None:
            self._lookups.forget(load.request.sequence_number)
        return LoadOrder(load.load_id, tuple(item.order for item in loading))

    def _sources(self, wanted: Sequence[tuple[BlockKey, int]]) -> list[_Loading]:
        """Where each block comes from. All slots that are read are taken into use before any is given away."""
        loading: dict[int, _Loading] = {}
        for key, block_id in reversed(wanted):
            host = self._index.find(key)
            if host is not None and host.ready:
                self._index.acquire(host)
                self._index.use(key)
                loading[block_id] = _Loading(LoadedBlock(key, block_id, host.slot, from_file=False), host)
                self._counts["loaded_from_memory"] += 1
        for key, block_id in wanted:
            if block_id not in loading:
                host = None if self._index.find(key) is not None else self._index.reserve(key)
                slot = NO_SLOT if host is None else host.slot
                loading[block_id] = _Loading(LoadedBlock(key, block_id, slot, from_file=True), host)
                self._counts["loaded_from_files"] += 1
        return [loading[block_id] for _, block_id in wanted]

    # What has become of it

    def update(self, report: TransferReport) -> None:
        self._counts.update({f"file_{name}": change for name, change in report.counts.items()})
        self._failed |= report.failed_blocks
        self._stores.update(report)
        for load_id in report.loaded:
            for item in self._loading.pop(load_id, []):
                self._end(item)
        if report.loaded:
            self._stores.slots_are_free()

    def _end(self, item: _Loading) -> None:
        failed = item.order.block_id in self._failed
        self._failed.discard(item.order.block_id)
        if failed:
            self._counts["failed_loads"] += 1
            if item.order.from_file and self._lookups is not None:
                self._lookups.distrust(item.order.key)
        elif item.order.from_file:
            self._stores.loaded_from_file(item.order.key)
        if item.host is None:
            return
        if failed:
            self._index.fail(item.host)
        else:
            item.host.ready = True
        self._index.release(item.host)

    def request_finished(self, request: TransferView, block_ids: Sequence[Sequence[int]]) -> Retention:  # noqa: ARG002
        if self._lookups is not None:
            self._lookups.forget(request.sequence_number)
        for content_hash in reversed(request.block_hashes()):  # its end is the first to leave
            for group in range(len(self._layout.groups)):
                self._index.refresh(BlockKey(group, content_hash))
        return Retention()

    def stats(self) -> Mapping[str, float]:
        return {
            "host_blocks": self._index.num_slots,
            "host_blocks_used": self._index.num_used,
            "host_evicted": self._index.num_evictions,
            **self._stores.stats(),
            **self._counts,
        }

    def reset(self) -> None:
        self._index.clear()
        self._stores.clear()
        self._epoch = os.urandom(16)
        self._spaces = self._spaces_of_workers()
        if self._lookups is not None:
            self._lookups.clear()

    def close(self) -> None:
        if self._lookups is not None:
            self._lookups.close()

    def _spaces_of_workers(self) -> list[bytes]:
        size = self._context.world_size
        return [space_of(self._context.fingerprint, rank, size, self._epoch) for rank in range(size)]
