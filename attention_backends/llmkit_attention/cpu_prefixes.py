"""Finds the sequences of a batch that begin with the same pages, so that attention reads those once for all of them.

Source: Juravsky et al., "Hydragen: High-Throughput LLM Inference with Shared Prefixes" (2024), for attending to a
shared prefix with the queries of all its sequences as one matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

IntArray = np.ndarray[Any, np.dtype[np.int32]]

LEAST_SEQUENCES = 4  # fewer are as fast one by one
LEAST_TOKENS = 128
PARTS_PER_THREAD = 3  # pieces of work that a thread should find, so that all end at about the same time


@dataclass(frozen=True)
class SharedPrefixes:
    """parts int32 [p, 3]: (first member, members, shared tokens) of sequences that are handled together.

    members int32: rows of the batch, all parts' behind one another. grouped int32 [rows]: 1 for a member.
    """

    parts: IntArray
    members: IntArray
    grouped: IntArray


def shared_prefixes(
    block_table: IntArray,
    query_lens: IntArray,
    seq_lens: IntArray,
    page_size: int,
    *,
    block: int,
    num_kv_heads: int,
    most_sequences: int,
    threads: int,
) -> SharedPrefixes | None:
    """Parts of the decoding rows (those with one query token) of `block_table` int32 [rows, pages]; None if none.

    Shared tokens are a multiple of `block`, and every member has at least one key of its own. A part has at most
    `most_sequences` members, and fewer where that gives `threads` threads work on `num_kv_heads` heads.
    """
    decoding = np.flatnonzero(query_lens == 1)
    if len(decoding) < LEAST_SEQUENCES:
        return None
    first = block_table[decoding, 0]
    order = np.argsort(first, kind="stable")
    starts = np.flatnonzero(np.diff(first[order], prepend=-1))
    if len(starts) > len(decoding) - LEAST_SEQUENCES + 1:
        return None  # too many different beginnings for any group
    parts: list[tuple[int, int, int]] = []
    members: list[int] = []
    for group in np.split(decoding[order], starts[1:]):
        if len(group) < LEAST_SEQUENCES:
            continue
        shared = _shared_tokens(block_table[group], seq_lens[group], page_size) // block * block
        if shared < LEAST_TOKENS:
            continue
        size = min(most_sequences, max(LEAST_SEQUENCES, -(-len(group) * num_kv_heads // (threads * PARTS_PER_THREAD))))
        for start in range(0, len(group), size):
            chosen = group[start : start + size].tolist()
            parts.append((len(members), len(chosen), shared))
            members += chosen
    if not parts:
        return None
    grouped = np.zeros(len(block_table), dtype=np.int32)
    grouped[members] = 1
    return SharedPrefixes(np.array(parts, dtype=np.int32), np.array(members, dtype=np.int32), grouped)


def _shared_tokens(tables: IntArray, seq_lens: IntArray, page_size: int) -> int:
    """Tokens of the pages with which all of `tables` begin; less than the shortest sequence has."""
    pages = min(tables.shape[1], (int(seq_lens.min()) - 1) // page_size)
    same = (tables[:, :pages] == tables[0, :pages]).all(axis=0)
    return (pages if same.all() else int(same.argmin())) * page_size


def equal(one: SharedPrefixes | None, other: SharedPrefixes | None) -> bool:
    """Whether two batches share prefixes in the same way."""
    if one is None or other is None:
        return one is other
    return np.array_equal(one.parts, other.parts) and np.array_equal(one.members, other.members)
