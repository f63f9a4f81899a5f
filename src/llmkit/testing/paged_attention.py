"""What tests of attention backends and models need: a paged cache in random order, and attention by definition."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from llmkit.execution.shared_prefixes import prefix_specs, prefixes_of, put_prefixes, shared_prefixes
from llmkit.execution.staging import StagingBuffer
from llmkit.hookspecs.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    PrefixSharing,
    SharedPrefixes,
)


@dataclass
class PagedPool:
    """Pages handed out in random order to sequences named by a number; page 0 is never handed out.

    `lengths` and `tables` hold what each sequence has so far. Caches of different layers may share the pool.
    """

    num_pages: int
    page_size: int
    seed: int = 0
    lengths: dict[int, int] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._free = list(range(1, self.num_pages))
        self._random.shuffle(self._free)

    def caches(
        self,
        backend: AttentionBackend,
        layers: Sequence[AttentionLayer],
        dtype: torch.dtype,
        *,
        fill: float = 0.0,
        device: torch.device | str = "cpu",
    ) -> list[torch.Tensor]:
        """A cache tensor for every layer, filled with `fill`."""
        shapes = [backend.kv_shape(self.num_pages, self.page_size, x.num_kv_heads, x.head_size) for x in layers]
        return [torch.full(shape, fill, dtype=dtype, device=device) for shape in shapes]

    def fork(self, source: int, sequence: int, tokens: int) -> None:
        """A new sequence that begins with the first tokens of `source`, whole pages of them."""
        assert tokens % self.page_size == 0
        assert sequence not in self.lengths
        self.tables[sequence] = self.tables[source][: tokens // self.page_size]
        self.lengths[sequence] = tokens

    def step(self, rows: Sequence[tuple[int, int]], device: torch.device | str = "cpu") -> AttentionBatch:
        """Append tokens to sequences, `rows` = (sequence, new tokens), and describe the step to a backend.

        Entries of the block table past a row's end are page numbers far outside, as nothing may read them.
        """
        slots: list[int] = []
        starts, lengths = [0], []
        for sequence, new in rows:
            before = self.lengths.get(sequence, 0)
            table = self.tables.setdefault(sequence, [])
            while len(table) * self.page_size < before + new:
                table.append(self._free.pop())
            self.lengths[sequence] = before + new
            slots += [
                table[p // self.page_size] * self.page_size + p % self.page_size for p in range(before, before + new)
            ]
            starts.append(starts[-1] + new)
            lengths.append(before + new)
        width = max(len(self.tables[sequence]) for sequence, _ in rows) + 1
        block_table = np.full((len(rows), width), 2**30, dtype=np.int32)
        for r, (sequence, _) in enumerate(rows):
            block_table[r, : len(self.tables[sequence])] = self.tables[sequence]
        query_start_loc, seq_lens = np.array(starts, dtype=np.int32), np.array(lengths, dtype=np.int32)
        return AttentionBatch(
            query_start_loc=torch.from_numpy(query_start_loc).to(device),
            seq_lens=torch.from_numpy(seq_lens).to(device),
            block_table=torch.from_numpy(block_table).to(device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
            query_start_loc_np=query_start_loc,
            seq_lens_np=seq_lens,
            num_rows=len(rows),
            num_tokens=starts[-1],
            max_query_len=max(new for _, new in rows),
            max_seq_len=max(lengths),
            page_size=self.page_size,
        )

    def positions(self, rows: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Positions int64 [t] of the tokens that the last `step` with these rows appended."""
        return torch.cat([torch.arange(self.lengths[s] - new, self.lengths[s]) for s, new in rows])


def prefixes_in(batch: AttentionBatch, sharing: PrefixSharing) -> SharedPrefixes | None:
    """What the rows of `batch` share, however little, as the core tells a backend that asks for it; see
    `AttentionBatch.prefixes`."""
    rows = np.flatnonzero(np.diff(batch.query_start_loc_np) == 1)
    if len(rows) < sharing.least_rows:
        return None
    pages = batch.block_table.cpu().numpy()[rows]
    groups = shared_prefixes(pages, batch.seq_lens_np[rows], batch.page_size, sharing, least_saved=0)
    if groups is None:
        return None
    staging = StagingBuffer(batch.seq_lens.device)
    host = staging.layout(prefix_specs(0, batch.num_rows, sharing))
    put_prefixes(host, 0, groups, rows, batch.seq_lens_np)
    sent = staging.send()
    return prefixes_of(sent, 0, batch.seq_lens_np - sent["shared_lens.0"].cpu().numpy())


def dense_attention(
    layer: AttentionLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Attention of one sequence by its definition, head by head, in float64.

    query [n, heads, head_size] are the last n of the s tokens of keys and values [s, kv_heads, head_size].
    """
    count, total = query.shape[0], keys.shape[0]
    position = torch.arange(total - count, total)[:, None]
    key_position = torch.arange(total)[None]
    hidden = key_position > position
    if layer.sliding_window is not None:
        hidden |= key_position <= position - layer.sliding_window
    output = torch.empty(query.shape, dtype=torch.float64)
    for head in range(layer.num_heads):
        kv_head = head * layer.num_kv_heads // layer.num_heads
        scores = query[:, head].double() @ keys[:, kv_head].double().T * layer.scale
        if layer.soft_cap is not None:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        output[:, head] = scores.masked_fill(hidden, float("-inf")).softmax(1) @ values[:, kv_head].double()
    return output
