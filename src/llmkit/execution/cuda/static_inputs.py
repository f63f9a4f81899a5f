"""A decode step's inputs at addresses that stay the same, which a captured graph reads."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from llmkit.execution.shared_prefixes import PrefixGroups, prefix_specs, prefixes_of, put_prefixes
from llmkit.execution.staging import ArraySpec, HostArray, StagingBuffer
from llmkit.hookspecs.attention import AttentionBatch

if TYPE_CHECKING:
    from llmkit.execution.block_table import BlockTable
    from llmkit.execution.input_batch import InputBatch
    from llmkit.scheduling.plan import IntArray, StepPlan


_NOTHING: IntArray = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class StaticInputs:
    """Of a batch of n padded rows, a token each: input_ids, positions, slots, next_positions int64[n]; one attention
    batch per KV group, planned for lengths that fill the block table."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    next_positions: torch.Tensor
    batches: tuple[AttentionBatch, ...]


class StaticStaging:
    """One piece of memory for the inputs of all sizes, brought to the device in one copy a step."""

    def __init__(
        self, batch: InputBatch, page_size: int, most_rows: int, scratch_slot: int, max_len: int, device: torch.device
    ) -> None:
        self._batch, self._page_size, self._max_len = batch, page_size, max_len
        self._scratch_slot = scratch_slot
        self._starts = np.arange(most_rows + 1, dtype=np.int32)
        self._device_starts = torch.from_numpy(self._starts).to(device)  # a copy waits for the device: once, here
        self.most_pages = batch.block_tables[0].pages.shape[1]
        self._buffer = StagingBuffer(device)
        # Largest first: addresses stay.
        self._buffer.layout(self._specs(most_rows, self.most_pages, batch.sharing_groups))

    @property
    def sharing_groups(self) -> tuple[int, ...]:
        """KV groups in which rows may share prefixes."""
        return self._batch.sharing_groups

    def inputs(self, rows: int, width: int, sharing: Collection[int]) -> StaticInputs:
        """Tensors that `fill` for so many rows and columns of the block table fills. sharing: KV groups in which rows
        share prefixes."""
        self._buffer.layout(self._specs(rows, width, sharing))
        tensors = self._buffer.views()
        length = min(width * self._page_size, self._max_len)
        lengths = np.full(rows, length, dtype=np.int32)
        batches = tuple(
            AttentionBatch(
                query_start_loc=self._device_starts[: rows + 1],
                seq_lens=tensors["seq_lens"],
                block_table=tensors[f"block_table.{group}"],
                slot_mapping=tensors[f"slot_mapping.{group}"],
                query_start_loc_np=self._starts[: rows + 1],
                seq_lens_np=lengths,
                num_rows=rows,
                num_tokens=rows,
                max_query_len=1,
                max_seq_len=length,
                page_size=self._page_size,
                prefixes=prefixes_of(tensors, group, lengths) if group in sharing else None,
            )
            for group in range(len(self._tables))
        )
        return StaticInputs(
            tensors["input_ids"], tensors["positions"], tensors["slots"], tensors["next_positions"], batches
        )

    def find_prefixes(self, plan: StepPlan) -> dict[int, PrefixGroups]:
        """What the rows of a decode step share, see `InputBatch.find_prefixes`."""
        return self._batch.find_prefixes(plan.slots, plan.num_computed + 1)

    def fill(
        self, plan: StepPlan | None, rows: int, width: int, prefixes: Mapping[int, PrefixGroups | None]
    ) -> IntArray:
        """Send a decode step's inputs, padded to `rows` rows: padding reads the first page, writes nowhere and shares
        nothing. plan: None for nothing but padding. prefixes: of the KV groups in which rows share prefixes. Returns
        the padded rows' lengths int32[rows], until the next `fill`."""
        slots = _NOTHING if plan is None else plan.slots
        computed = _NOTHING if plan is None else plan.num_computed
        count = len(slots)
        host = self._buffer.layout(self._specs(rows, width, prefixes))
        _put(host["input_ids"], self._batch.token_ids[slots, computed], 0)
        _put(host["positions"], computed, 0)
        _put(host["slots"], slots, self._scratch_slot)
        _put(host["next_positions"], computed + 1, 0)
        _put(host["seq_lens"], computed + 1, 1)
        used = -(-(int(computed.max(initial=0)) + 1) // self._page_size)
        for group, table in enumerate(self._tables):
            pages = host[f"block_table.{group}"]
            pages[:count, :used] = table.pages[slots, :used]
            pages[count:, :1] = 0
            _put(host[f"slot_mapping.{group}"], table.slot_mapping(slots, computed), -1)
        for group, groups in prefixes.items():
            put_prefixes(host, group, groups, None, host["seq_lens"])
        self._buffer.copy()
        return host["seq_lens"]

    @property
    def _tables(self) -> Sequence[BlockTable]:
        return self._batch.block_tables

    def _specs(self, rows: int, width: int, sharing_groups: Iterable[int]) -> dict[str, ArraySpec]:
        names = ("input_ids", "positions", "slots", "next_positions")
        specs: dict[str, ArraySpec] = dict.fromkeys(names, (np.int64, (rows,)))
        specs["seq_lens"] = (np.int32, (rows,))
        for group in range(len(self._tables)):
            specs[f"slot_mapping.{group}"] = (np.int64, (rows,))
            specs[f"block_table.{group}"] = (np.int32, (rows, width))
        for group in sharing_groups:
            assert self._batch.sharing is not None
            specs |= prefix_specs(group, rows, self._batch.sharing)
        return specs


def _put(array: HostArray, values: HostArray, padding: int) -> None:
    array[: len(values)] = values
    array[len(values) :] = padding
