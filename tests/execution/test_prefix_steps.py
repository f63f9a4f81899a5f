"""Steps in which the attention backend is told what rows share: launched one by one and from static inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from llmkit.hookspecs.attention import AttentionBatch, AttentionLayer, PrefixSharing

from .conftest import PagedAttention

PROMPT = [5, 17, 3, 3, 21, 8, 30, 11, 2, 14, 9, 1, 7]


class SharingAttention(PagedAttention):
    """Reads shared tokens from the pages of a group's first member and all others from a row's own, where it finds
    what it was told on the device."""

    def __init__(self, sharing: PrefixSharing) -> None:
        self.prefix_sharing = sharing
        self.told: list[tuple[int, ...]] = []  # of each call with prefixes, what rows share

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionBatch,
    ) -> torch.Tensor:
        prefixes = metadata.prefixes
        if prefixes is not None and layer.sliding_window is None:
            self.told.append(tuple(prefixes.shared_lens.tolist()))
            assert torch.equal(prefixes.own_lens + prefixes.shared_lens, metadata.seq_lens)
            table = torch.full_like(metadata.block_table, -1)
            page = metadata.page_size
            for row, (shared, length) in enumerate(
                zip(prefixes.shared_lens.tolist(), metadata.seq_lens.tolist(), strict=True)
            ):
                end = -(-length // page)
                table[row, shared // page : end] = metadata.block_table[row, shared // page : end]
            starts = prefixes.group_starts.tolist()
            for first, last in zip(starts, starts[1:], strict=False):
                for row in prefixes.members[first:last].tolist():
                    shared = int(prefixes.shared_lens[row]) // page
                    table[row, :shared] = metadata.block_table[int(prefixes.members[first]), :shared]
            metadata = replace(metadata, block_table=table)
        return super().forward(layer, query, key, value, kv_cache, metadata)


@pytest.fixture
def shared_driver(driver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """As `driver`, with attention that asks for shared prefixes."""

    def make(sharing: PrefixSharing, **options: Any) -> tuple[Any, SharingAttention]:
        backend = SharingAttention(sharing)
        monkeypatch.setattr("tests.execution.conftest.PagedAttention", lambda: backend, raising=False)
        return driver(**options), backend

    return make
