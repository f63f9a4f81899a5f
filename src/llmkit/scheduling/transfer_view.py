"""What a connector sees of sequences and steps: read-only and live."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from llmkit.hookspecs.connector import FilledBlock, Load, ScheduledRow
from llmkit.kv_cache.manager import KVCacheManager
from llmkit.requests.request import Request, View
from llmkit.scheduling.plan_builder import PlanBuilder


class SequenceView(View):
    """A sequence as a connector sees it: `llmkit.hookspecs.connector.TransferView`."""

    __slots__ = ("__manager", "__request")

    def __init__(self, request: Request, manager: KVCacheManager) -> None:
        super().__init__(request)
        self.__request = request
        self.__manager = manager

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        params = self.__request.request.kv_transfer_params
        return None if params is None else MappingProxyType(params)

    @property
    def cache_salt(self) -> str | None:
        return self.__request.cache_salt

    def token_ids(self, first: int = 0, last: int | None = None) -> list[int]:
        return self.__request.token_ids[first:last]

    def block_hashes(self, num_blocks: int | None = None) -> list[bytes]:
        request = self.__request
        return self.__manager.block_hashes(request, request.num_tokens if num_blocks is None else num_blocks)

    def block_ids(self) -> tuple[tuple[int, ...], ...]:
        return tables_of(self.__manager, self.__request)


class PlannedStep:
    """A step that is being planned: `llmkit.hookspecs.connector.StepView`. Rows are made when they are asked for."""

    __slots__ = ("_manager", "_num_new", "_requests", "_rows", "filled", "loads", "step")

    def __init__(
        self,
        step: int,
        batch: PlanBuilder,
        loads: Sequence[Load],
        filled: Sequence[FilledBlock],
        manager: KVCacheManager,
    ) -> None:
        self.step = step
        self.loads = tuple(loads)
        self.filled = tuple(filled)
        self._requests = batch.requests
        self._num_new = batch.num_new
        self._manager = manager
        self._rows: tuple[ScheduledRow, ...] | None = None

    def cached_block(self, group: int, block_hash: bytes) -> int | None:
        return self._manager.cached_block(group, block_hash)

    @property
    def rows(self) -> Sequence[ScheduledRow]:
        if self._rows is None:
            self._rows = tuple(
                ScheduledRow(SequenceView(request, self._manager), request.num_computed_tokens, num_new)
                for request, num_new in zip(self._requests, self._num_new, strict=True)
            )
        return self._rows


def tables_of(manager: KVCacheManager, request: Request) -> tuple[tuple[int, ...], ...]:
    """The block tables of `request`; empty if it holds no blocks."""
    if not manager.capacity(request):
        return ()
    return tuple(tuple(table) for table in manager.block_ids(request))
