"""Finds the rows of a step that begin with the same pages, so that attention may read those once for all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from llmkit.execution.staging import ArraySpec, HostArray
from llmkit.hookspecs.attention import SharedPrefixes

if TYPE_CHECKING:
    import torch

    from llmkit.execution.block_table import BlockTable
    from llmkit.hookspecs.attention import PrefixSharing
    from llmkit.scheduling.plan import IntArray


@dataclass(frozen=True)
class PrefixGroups:
    """members int32[m]: rows, group after group; starts int32[g+1]: where each begins; tokens int32[g]: what the rows
    of each share."""

    members: IntArray
    starts: IntArray
    tokens: IntArray

    @property
    def shared_by_member(self) -> IntArray:
        """int32[m]"""
        return np.repeat(self.tokens, np.diff(self.starts))


class PrefixFinder:
    """Of one KV group. What was found is kept while the same slots are asked for and their tables have but grown."""

    def __init__(self, table: BlockTable, sharing: PrefixSharing, bytes_per_token: int) -> None:
        """bytes_per_token: of a layer's keys and values."""
        self._table, self._sharing, self._bytes_per_token = table, sharing, bytes_per_token
        self._known: tuple[IntArray, int, PrefixGroups | None] | None = None

    def find(self, slots: IntArray, seq_lens: IntArray) -> PrefixGroups | None:
        """Groups among the sequences in `slots` with `seq_lens` tokens, int32[n] each; members are places in these.
        Every member has a token more than it shares. None if they share too little."""
        if len(slots) < self._sharing.least_rows:
            return None
        rewrites = self._table.num_rewrites
        if self._known is None or self._known[1] != rewrites or not np.array_equal(self._known[0], slots):
            width = (int(seq_lens.max()) - 1) // self._table.page_size
            pages = self._table.pages[slots, :width]
            least = self._sharing.least_saved(len(slots), self._bytes_per_token)
            found = shared_prefixes(pages, seq_lens, self._table.page_size, self._sharing, least)
            self._known = slots.copy(), rewrites, found
        return self._known[2]


def shared_prefixes(
    pages: IntArray, seq_lens: IntArray, page_size: int, sharing: PrefixSharing, least_saved: int
) -> PrefixGroups | None:
    """The disjoint groups that save most, of rows with `seq_lens` int32[n] tokens in `pages` int32[n, w]; entries past
    a row's end are arbitrary. None if they save the reading of fewer keys than `least_saved`, or of none."""
    most = (seq_lens - 1) // page_size  # pages that a row can share
    unit = math.lcm(sharing.unit, page_size)
    rows = _rows_with_company(pages, most * page_size >= unit, sharing.least_rows)
    if not len(rows):
        return None
    order, common = _in_order(pages[rows], most[rows])
    tokens = common * page_size // unit * unit
    groups = _best_groups(tokens, sharing.least_rows)
    if sum((stop - start - 1) * shared for start, stop, shared in groups) < max(1, least_saved):
        return None
    members = np.concatenate([rows[order[start:stop]] for start, stop, _ in groups]).astype(np.int32)
    starts = np.cumsum([0, *(stop - start for start, stop, _ in groups)], dtype=np.int32)
    return PrefixGroups(members, starts, np.array([shared for *_, shared in groups], dtype=np.int32))


def _rows_with_company(pages: IntArray, possible: HostArray, least_rows: int) -> HostArray:
    """Rows whose first page is that of enough possible rows."""
    rows = np.flatnonzero(possible)
    if len(rows) < least_rows:
        return rows[:0]
    _, kind, count = np.unique(pages[rows, 0], return_inverse=True, return_counts=True)
    return rows[count[kind] >= least_rows]


def _in_order(pages: IntArray, most: IntArray) -> tuple[HostArray, HostArray]:
    """(rows int64[n] in such an order that those with a common beginning are neighbours, pages [n-1] that each shares
    with the next)."""
    width = int(most.max())
    table = np.where(np.arange(width) < most[:, None], pages[:, :width], np.int32(-1))
    order = np.argsort(np.ascontiguousarray(table).view(f"V{4 * width}").ravel())
    table, most = table[order], most[order]
    differs = np.ones((len(table) - 1, width + 1), dtype=np.bool_)
    np.not_equal(table[1:], table[:-1], out=differs[:, :width])
    return order, np.minimum(differs.argmax(axis=1), np.minimum(most[1:], most[:-1]))


def _best_groups(common: HostArray, least_rows: int) -> list[tuple[int, int, int]]:
    """common [n-1]: tokens that neighbours share. (start, stop, tokens) of groups of neighbours.

    Where all share something, either they are one group, or it is cut where least is shared and each piece is looked
    at by itself: whatever saves more.
    """
    pieces: list[tuple[int, int, int, int]] = []  # start, stop, tokens, the piece that it was cut from
    todo = [(0, len(common) + 1, -1)]
    while todo:
        start, stop, parent = todo.pop()
        if stop - start < least_rows:
            continue
        inside = common[start : stop - 1]
        tokens = int(inside.min())
        cuts = np.flatnonzero(inside == tokens) + start + 1
        if len(cuts) < len(inside):
            todo += [(a, b, len(pieces)) for a, b in pairwise((start, *cuts.tolist(), stop))]
        pieces.append((start, stop, tokens, parent))
    cut_up = [0] * len(pieces)  # what is saved if a piece is no group itself
    for number in reversed(range(len(pieces))):
        start, stop, tokens, parent = pieces[number]
        if parent >= 0:
            cut_up[parent] += max((stop - start - 1) * tokens, cut_up[number])
    groups, inside_group = [], [False] * len(pieces)
    for number, (start, stop, tokens, parent) in enumerate(pieces):
        inside_group[number] = parent >= 0 and inside_group[parent]
        if tokens and not inside_group[number] and (stop - start - 1) * tokens >= cut_up[number]:
            groups.append((start, stop, tokens))
            inside_group[number] = True
    return groups


def prefix_specs(group: int, rows: int, sharing: PrefixSharing) -> dict[str, ArraySpec]:
    """The arrays of a step of `rows` rows that tell of the prefixes of KV group `group`, for a `StagingBuffer`."""
    names = _names(group)
    shapes = (rows // sharing.least_rows + 1, rows, rows, rows)
    return {name: (np.int32, (size,)) for name, size in zip(names, shapes, strict=True)}


def put_prefixes(
    host: Mapping[str, HostArray], group: int, groups: PrefixGroups | None, rows: HostArray | None, seq_lens: IntArray
) -> None:
    """Fill the arrays of `prefix_specs`. rows: what the members are places in; None: in all rows. seq_lens int32[n]: of
    all rows, padding included."""
    starts, members, shared, own = (host[name] for name in _names(group))
    starts[:], members[:], shared[:] = 0, 0, 0
    if groups is not None:
        chosen = groups.members if rows is None else rows[groups.members]
        starts[:] = groups.starts[-1]
        starts[: len(groups.starts)] = groups.starts
        members[: len(chosen)] = chosen
        shared[chosen] = groups.shared_by_member
    np.subtract(seq_lens, shared, out=own)


def prefixes_of(tensors: Mapping[str, torch.Tensor], group: int, own_lens_np: IntArray) -> SharedPrefixes:
    """What the arrays of `prefix_specs` hold, on the device."""
    starts, members, shared, own = (tensors[name] for name in _names(group))
    return SharedPrefixes(starts, members, shared, own, own_lens_np)


def own_lens(host: Mapping[str, HostArray], group: int) -> IntArray:
    """int32[n] of the arrays of `prefix_specs`, on the host."""
    return host[_names(group)[3]]


def _names(group: int) -> tuple[str, str, str, str]:
    return (f"group_starts.{group}", f"members.{group}", f"shared_lens.{group}", f"own_lens.{group}")
