"""The persistent batch: what is known of every slot, and a step's input tensors made from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from llmkit.execution.block_table import BlockTable
from llmkit.execution.shared_prefixes import (
    PrefixFinder,
    PrefixGroups,
    own_lens,
    prefix_specs,
    prefixes_of,
    put_prefixes,
)
from llmkit.execution.staging import ArraySpec, StagingBuffer
from llmkit.hookspecs.attention import AttentionBatch
from llmkit.mapped_memory import lazy_zeros

if TYPE_CHECKING:
    from llmkit.hookspecs.attention import PrefixSharing
    from llmkit.kv_cache.layout import KVCacheLayout
    from llmkit.scheduling.plan import AddedRow, BlockUpdate, IntArray, StepPlan

MANY_BLOCKS = 8  # that are faster written as arrays


@dataclass(frozen=True)
class StepInputs:
    """Device tensors of one step with n rows, t tokens, s sampling rows.

    input_ids, positions int64[t]. batches: one per KV group. sampling_rows int32[s]: plan rows that sample, on the
    host. logits_indices int64[s]: the token of each whose hidden state becomes logits; None if that is every token.
    sampled_positions int32[s]: positions that the sampled tokens will have, on the host.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    batches: tuple[AttentionBatch, ...]
    sampling_rows: IntArray
    logits_indices: torch.Tensor | None
    sampled_positions: IntArray


class InputBatch:
    """State of all slots on the host, in arrays indexed by slot; the only per-sequence work is for changed ones.

    token_ids int32[max_num_seqs, max_model_len + 1]: tokens so far; a sampled token is written behind them, so that
    the next plan may refer to it. Memory is committed as rows are written. sharing: what the attention backend
    asks for.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        sharing: PrefixSharing | None = None,
    ) -> None:
        max_blocks = -(-(max_model_len + 1) // layout.block_size)
        self.token_ids: IntArray = lazy_zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.block_tables = tuple(
            BlockTable(max_num_seqs, max_blocks, layout.block_size, layout.page_size) for _ in layout.groups
        )
        self.sharing = sharing
        # Pages that a window has left behind are all the same one: nothing to be found there.
        self._finders = {
            group: PrefixFinder(self.block_tables[group], sharing, kept.spec.bytes_per_token)
            for group, kept in enumerate(layout.groups)
            if sharing is not None and kept.spec.sliding_window is None
        }
        self._page_size = layout.page_size
        self._staging = StagingBuffer(device)

    def add(self, row: AddedRow) -> None:
        """A sequence enters; whatever the slot held before is overwritten."""
        self.token_ids[row.slot, : len(row.token_ids)] = row.token_ids
        for table, block_ids in zip(self.block_tables, row.block_ids, strict=True):
            table.write(row.slot, 0, block_ids)

    def update(self, changes: Sequence[BlockUpdate]) -> None:
        """Sequences got more blocks. One block each for many, which is what comes in a decode step, is one write."""
        for group, table in enumerate(self.block_tables):
            of_group = [change for change in changes if change.group == group]
            single = [change for change in of_group if len(change.block_ids) == 1]
            if len(single) >= MANY_BLOCKS and len({change.slot for change in of_group}) == len(of_group):
                of_group = [change for change in of_group if len(change.block_ids) != 1]
                blocks = [change.block_ids[0] for change in single]
                table.write_each([change.slot for change in single], [change.start for change in single], blocks)
            for change in of_group:
                table.write(change.slot, change.start, change.block_ids)

    def record(self, plan: StepPlan, rows: IntArray, token_ids: IntArray) -> None:
        """Write the tokens [s] sampled for plan rows `rows` [s] behind their sequences."""
        self.token_ids[plan.slots[rows], plan.num_computed[rows] + plan.num_new[rows]] = token_ids

    @property
    def sharing_groups(self) -> tuple[int, ...]:
        """KV groups in which prefixes are looked for."""
        return tuple(self._finders)

    def find_prefixes(self, slots: IntArray, seq_lens: IntArray) -> dict[int, PrefixGroups]:
        """By KV group, what the sequences in `slots` with `seq_lens` tokens, int32[n] each, share, if it is enough."""
        found = {group: finder.find(slots, seq_lens) for group, finder in self._finders.items()}
        return {group: groups for group, groups in found.items() if groups is not None}

    def prepare(self, plan: StepPlan) -> StepInputs:
        """The inputs of `plan`, whose changes have been applied. They are valid until the next call."""
        rows = plan.num_rows
        seq_lens = plan.num_computed + plan.num_new
        starts = np.zeros(rows + 1, dtype=np.int32)
        np.cumsum(plan.num_new, out=starts[1:])
        sampling_rows = np.flatnonzero(plan.samples).astype(np.int32)
        tokens, max_query_len, max_seq_len = int(starts[-1]), int(plan.num_new.max()), int(seq_lens.max())
        alone = np.flatnonzero(plan.num_new == 1)
        prefixes = self.find_prefixes(plan.slots[alone], seq_lens[alone])
        host = self._staging.layout(self._specs(rows, tokens, len(sampling_rows), max_seq_len, prefixes))
        slots, positions = _per_token(plan, starts, max_query_len)
        host["input_ids"][:] = self.token_ids[slots, positions]
        host["positions"][:] = positions
        host["query_start_loc"][:] = starts
        host["seq_lens"][:] = seq_lens
        host["logits_indices"][:] = starts[1:][sampling_rows] - 1
        for group, table in enumerate(self.block_tables):
            pages = host[f"block_table.{group}"]
            np.take(table.pages[:, : pages.shape[1]], plan.slots, axis=0, out=pages)
            host[f"slot_mapping.{group}"][:] = table.slot_mapping(slots, positions)
        for group, groups in prefixes.items():
            put_prefixes(host, group, groups, alone, seq_lens)
        sent = self._staging.send()
        batches = tuple(
            AttentionBatch(
                query_start_loc=sent["query_start_loc"],
                seq_lens=sent["seq_lens"],
                block_table=sent[f"block_table.{group}"],
                slot_mapping=sent[f"slot_mapping.{group}"],
                query_start_loc_np=host["query_start_loc"],
                seq_lens_np=host["seq_lens"],
                num_rows=rows,
                num_tokens=tokens,
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
                page_size=self._page_size,
                prefixes=prefixes_of(sent, group, own_lens(host, group)) if group in prefixes else None,
            )
            for group in range(len(self.block_tables))
        )
        return StepInputs(
            input_ids=sent["input_ids"],
            positions=sent["positions"],
            batches=batches,
            sampling_rows=sampling_rows,
            logits_indices=None if len(sampling_rows) == tokens else sent["logits_indices"],
            sampled_positions=seq_lens[sampling_rows],
        )

    def _specs(
        self, rows: int, tokens: int, sampling: int, max_seq_len: int, sharing_groups: Iterable[int]
    ) -> dict[str, ArraySpec]:
        pages = -(-max_seq_len // self._page_size)
        specs: dict[str, ArraySpec] = {
            "input_ids": (np.int64, (tokens,)),
            "positions": (np.int64, (tokens,)),
            "query_start_loc": (np.int32, (rows + 1,)),
            "seq_lens": (np.int32, (rows,)),
            "logits_indices": (np.int64, (sampling,)),
        }
        for group in range(len(self.block_tables)):
            specs[f"block_table.{group}"] = (np.int32, (rows, pages))
            specs[f"slot_mapping.{group}"] = (np.int64, (tokens,))
        for group in sharing_groups:
            assert self.sharing is not None
            specs |= prefix_specs(group, rows, self.sharing)
        return specs


def _per_token(plan: StepPlan, starts: IntArray, max_query_len: int) -> tuple[IntArray, IntArray]:
    """(slot, position) of every token, int32[t] each."""
    if max_query_len == 1:
        return plan.slots, plan.num_computed
    slots = np.repeat(plan.slots, plan.num_new)
    first = np.repeat(plan.num_computed - starts[:-1], plan.num_new)
    return slots, first + np.arange(int(starts[-1]), dtype=np.int32)
