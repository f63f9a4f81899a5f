"""The moving half: drives each member as the core would drive it alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from llmkit.hookspecs.connector import TransferReport, WorkerConnector

if TYPE_CHECKING:
    import torch

    from llmkit.execution.worker_transfers import WorkerTransfers
    from llmkit.kv_cache.layout import KVCacheLayout


class MultiWorker(WorkerConnector):
    """halves: the moving half of each member. guard: makes a half one that fails alone."""

    def __init__(
        self, halves: Sequence[WorkerConnector], guard: Callable[[WorkerConnector, int], WorkerTransfers]
    ) -> None:
        self._halves = tuple(halves)
        self._guard = guard
        self._members: tuple[WorkerTransfers, ...] = ()

    def register(self, layout: KVCacheLayout, kv_caches: Sequence[torch.Tensor]) -> None:
        for half in self._halves:
            half.register(layout, kv_caches)
        self._members = tuple(self._guard(half, len(kv_caches)) for half in self._halves)

    def start_load(self, payload: Any) -> None:
        for member, transfers in zip(self._members, payload, strict=True):
            member.begin(transfers)

    def wait_for_layer(self, layer: int) -> None:
        for member in self._members:
            member.before_layer(layer)

    def save_layer(self, layer: int) -> None:
        for member in self._members:
            member.after_layer(layer)

    def wait_for_save(self) -> None:
        for member in self._members:
            member.wait_for_save()

    def report(self) -> TransferReport:
        reports = [member.finish() for member in self._members]
        inner = tuple((str(i), fault) for i, member in enumerate(self._members) for fault in member.take_faults())
        return TransferReport(
            frozenset().union(*(report.loaded for report in reports)),
            frozenset().union(*(report.released for report in reports)),
            frozenset().union(*(report.failed_blocks for report in reports)),
            {f"{i}.{name}": count for i, report in enumerate(reports) for name, count in report.counts.items()},
            frozenset().union(*(report.failed_holds for report in reports)),
            inner + tuple((f"{i}.{part}", fault) for i, r in enumerate(reports) for part, fault in r.part_faults),
        )

    def cancel(self, load_ids: Collection[int]) -> None:
        for member in self._members:
            member.cancel(load_ids)

    def wait(self, seconds: float) -> None:
        """Nobody knows which of them will be first: each gets a part of the time."""
        end = time.monotonic() + seconds
        for member in self._members:
            left = end - time.monotonic()
            if left > 0:
                member.wait(min(left, seconds / len(self._members)))

    def close(self) -> None:
        if not self._members:
            for half in self._halves:
                half.close()
        for member in self._members:
            member.close()
