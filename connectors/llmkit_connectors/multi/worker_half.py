"""The moving half: drives each member as the core would drive it alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from llmkit.hookspecs.connector import TransferReport, WorkerConnector

if TYPE_CHECKING:
    import torch

    from llmkit.execution.worker_transfers import WorkerTransfers
    from llmkit.kv_cache.layout import KVCacheLayout

logger = logging.getLogger("llmkit.connectors")


class MultiWorker(WorkerConnector):
    """halves: name and moving half of each member. guard: makes a half one that fails alone."""

    def __init__(
        self,
        halves: Sequence[tuple[str, WorkerConnector]],
        guard: Callable[[WorkerConnector, int], WorkerTransfers],
    ) -> None:
        self._halves = tuple(halves)
        self._guard = guard
        self._members: tuple[WorkerTransfers, ...] = ()
        self._faulty: set[str] = set()

    def register(self, layout: KVCacheLayout, kv_caches: Sequence[torch.Tensor]) -> None:
        for _, half in self._halves:
            half.register(layout, kv_caches)
        self._members = tuple(self._guard(half, len(kv_caches)) for _, half in self._halves)

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
        for (name, _), member in zip(self._halves, self._members, strict=True):
            self._log(name, member.take_faults())
        return TransferReport(
            frozenset().union(*(report.loaded for report in reports)),
            frozenset().union(*(report.released for report in reports)),
            frozenset().union(*(report.failed_blocks for report in reports)),
            {f"{i}.{name}": count for i, report in enumerate(reports) for name, count in report.counts.items()},
            frozenset().union(*(report.failed_holds for report in reports)),
        )

    def _log(self, name: str, faults: Sequence[str]) -> None:
        if faults and name not in self._faulty:
            self._faulty.add(name)
            logger.warning("the connector %r is at fault: %s. Further faults are not logged.", name, faults[0])

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
            for _, half in self._halves:
                half.close()
        for member in self._members:
            member.close()
