"""A decode step's inputs at addresses that stay the same, which a captured graph reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

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
        self._device = device
        self.most_pages = batch.block_tables[0].pages.shape[1]
        self._buffer = StagingBuffer(device)
        self._buffer.layout(self._specs(most_rows, self.most_pages))  # largest first: addresses stay

    def inputs(self, rows: int, width: int) -> StaticInputs:
        """Tensors that `fill` for so many rows and columns of the block table fills."""
        self._buffer.layout(self._specs(rows, width))
        tensors = self._buffer.views()
        starts = np.arange(rows + 1, dtype=np.int32)
        length = min(width * self._page_size, self._max_len)
        batches = tuple(
            AttentionBatch(
                query_start_loc=torch.from_numpy(starts).to(self._device),
                seq_lens=tensors["seq_lens"],
                block_table=tensors[f"block_table.{group}"],
                slot_mapping=tensors[f"slot_mapping.{group}"],
                query_start_loc_np=starts,
                seq_lens_np=np.full(rows, length, dtype=np.int32),
                num_rows=rows,
                num_tokens=rows,
                max_query_len=1,
                max_seq_len=length,
                page_size=self._page_size,
            )
            for group in range(len(self._tables))
        )
        return StaticInputs(
            tensors["input_ids"], tensors["positions"], tensors["slots"], tensors["next_positions"], batches
        )

    def fill(self, plan: StepPlan | None, rows: int, width: int) -> IntArray:
        """Send a decode step's inputs, padded to `rows` rows: padding reads the first page and writes nowhere. None:
        nothing but padding. Returns the padded rows' lengths int32[rows], until the next `fill`."""
        slots = _NOTHING if plan is None else plan.slots
        computed = _NOTHING if plan is None else plan.num_computed
        count = len(slots)
        host = self._buffer.layout(self._specs(rows, width))
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
        self._buffer.copy()
        return host["seq_lens"]

    @property
    def _tables(self) -> Sequence[BlockTable]:
        return self._batch.block_tables

    def _specs(self, rows: int, width: int) -> dict[str, ArraySpec]:
        names = ("input_ids", "positions", "slots", "next_positions")
        specs: dict[str, ArraySpec] = dict.fromkeys(names, (np.int64, (rows,)))
        specs["seq_lens"] = (np.int32, (rows,))
        for group in range(len(self._tables)):
            specs[f"slot_mapping.{group}"] = (np.int64, (rows,))
            specs[f"block_table.{group}"] = (np.int32, (rows, width))
        return specs


def _put(array: HostArray, values: HostArray, padding: int) -> None:
    array[: len(values)] = values
    array[len(values) :] = padding
