"""Block tables of one KV group, by slot, in the kernel's pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from llmkit.mapped_memory import lazy_zeros
from llmkit.scheduling.plan import IntArray


class BlockTable:
    """pages int32[max_num_seqs, max_blocks * pages_per_block]: row s is slot s's table, entries past its end are
    arbitrary. Memory is committed as rows are written. num_rewrites: how often what had been written before was
    overwritten; while it stays the same, tables have but grown."""

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int, page_size: int) -> None:
        self.page_size = page_size
        self._pages_per_block = block_size // page_size
        self.pages: IntArray = lazy_zeros((max_num_seqs, max_blocks * self._pages_per_block), np.int32)
        self.num_rewrites = 0
        self._ends = np.zeros(max_num_seqs, dtype=np.int64)  # pages written of each table
        self._page_offsets = np.arange(self._pages_per_block, dtype=np.int32)

    def write(self, slot: int, start: int, block_ids: Sequence[int]) -> None:
        """Set the blocks of `slot` from block column `start` on."""
        blocks = np.asarray(block_ids, dtype=np.int32)
        pages = (blocks[:, None] * self._pages_per_block + self._page_offsets).ravel()
        first = start * self._pages_per_block
        self.num_rewrites += first < self._ends[slot]
        self._ends[slot] = first + len(pages)
        self.pages[slot, first : first + len(pages)] = pages

    def write_each(self, slots: Sequence[int], starts: Sequence[int], block_ids: Sequence[int]) -> None:
        """`write` for many: a block for each of `slots` at block column `starts`, all [n]. No slot
        occurs twice."""
        rows, first = np.array(slots, dtype=np.int64), np.array(starts, dtype=np.int64) * self._pages_per_block
        self.num_rewrites += int(np.count_nonzero(first < self._ends[rows]))
        self._ends[rows] = first + self._pages_per_block
        pages = np.array(block_ids, dtype=np.int32)[:, None] * self._pages_per_block + self._page_offsets
        self.pages[rows[:, None], first[:, None] + self._page_offsets] = pages

    def slot_mapping(self, slots: IntArray, positions: IntArray) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Cache slots int64[t] (page * page_size + offset) of tokens at `positions` of sequences `slots`, both [t]."""
        columns, offsets = np.divmod(positions, self.page_size)
        pages = self.pages[slots, columns].astype(np.int64)
        return pages * self.page_size + offsets
