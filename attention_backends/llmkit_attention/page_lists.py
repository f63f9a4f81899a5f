"""A step's block table as libraries want it that take the pages of all rows in one list, one row after the other."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from llmkit.hookspecs.attention import AttentionBatch
from llmkit_attention.triton_launch import PreparedLaunch
from llmkit_attention.triton_schedule import IntArray

_BLOCK = 256


@triton.jit(do_not_specialize=["table_stride"])
def gather_kernel(table_ptr, starts_ptr, list_ptr, table_stride, BLOCK: tl.constexpr):
    """One program: BLOCK pages of one row."""
    row = tl.program_id(0)
    start = tl.load(starts_ptr + row)
    count = tl.load(starts_ptr + row + 1) - start
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(table_ptr + row.to(tl.int64) * table_stride + column, mask=column < count)
    tl.store(list_ptr + start + column, page, mask=column < count)


class PageLists:
    """`starts` int32[n+1]: where each row's pages begin in `pages`; `last` int32[n]: tokens in each row's last page,
    both on the host. `device_starts` is what `gather` reads; whoever launches it puts `starts` there.

    Room is made for rows of `most` tokens each, by default for the batch's own lengths. What `gather` has not filled
    is page 0.
    """

    def __init__(self, batch: AttentionBatch, *, most: int | None = None) -> None:
        rows, size = batch.num_rows, batch.page_size
        self._page_size = size
        self.measure(batch.seq_lens_np[:rows])
        widest = -(-(int(batch.seq_lens_np[:rows].max(initial=1)) if most is None else most) // size)
        widest = min(widest, batch.block_table.shape[1])
        device = batch.block_table.device
        room = int(self.starts[-1]) if most is None else rows * widest
        self.pages = torch.zeros(room, dtype=torch.int32, device=device)
        self.device_starts = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self._launch = PreparedLaunch(
            gather_kernel,
            (rows, -(-widest // _BLOCK), 1),
            tensors=(self.device_starts, self.pages),
            strides=(),
            numbers=(batch.block_table.stride(0),),
            constants={"BLOCK": _BLOCK},
        )
        self._table = batch.block_table

    def measure(self, lengths: IntArray) -> None:
        """Rows have `lengths` int32[n] tokens, at least one each."""
        counts = -(-lengths // self._page_size)
        starts = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        self.starts = torch.from_numpy(starts)
        self.last = torch.from_numpy(lengths - (counts - 1) * self._page_size)
        self.lengths = torch.from_numpy(lengths.copy())

    def gather(self) -> None:
        """Launch the copy of the block table's pages into `pages`."""
        self._launch(self._table)
