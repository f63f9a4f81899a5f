"""What single requests add to or forbid in their logits, as index operations over sparse lists of entries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

HostArray = np.ndarray[Any, Any]


class SlotEntries:
    """A list of vocabulary entries, with or without a value each, for every slot that has one.

    Lists of the rows of a batch are joined and brought to the device once, and kept while the rows stay the same.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._entries: dict[int, tuple[HostArray, HostArray]] = {}
        self._joined_for: tuple[bytes, bytes] | None = None
        self._joined: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def set(self, slot: int, token_ids: Iterable[int], values: Iterable[float] = ()) -> None:
        """Ids outside the vocabulary name nothing and are left out."""
        ids = np.fromiter(token_ids, dtype=np.int64)
        numbers = np.fromiter(values, dtype=np.float32)
        inside = (ids >= 0) & (ids < self._vocab_size)
        self._entries[slot] = (ids[inside], numbers[inside] if len(numbers) else np.zeros(inside.sum(), np.float32))
        self._joined_for = None

    def remove(self, slot: int) -> None:
        if self._entries.pop(slot, None) is not None:
            self._joined_for = None

    def joined(self, rows: HostArray, slots: HostArray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(row int64[m], token int64[m], value float32[m]) of all entries; rows[i] is the logits' row of slots[i]."""
        key = (rows.tobytes(), slots.tobytes())
        if self._joined is None or self._joined_for != key:
            lists = [self._entries[slot] for slot in slots.tolist()]
            row_ids = np.repeat(rows.astype(np.int64), [len(ids) for ids, _ in lists])
            tokens = np.concatenate([ids for ids, _ in lists])
            values = np.concatenate([numbers for _, numbers in lists])
            self._joined = (
                torch.from_numpy(row_ids).to(self._device),
                torch.from_numpy(tokens).to(self._device),
                torch.from_numpy(values).to(self._device),
            )
            self._joined_for = key
        return self._joined


class BannedSequences:
    """Token sequences that must not appear in the answer: a sequence's last token is forbidden whenever the answer
    ends with the tokens before it."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._prefixes: dict[int, HostArray] = {}
        self._last_tokens: dict[int, HostArray] = {}

    def set(self, slot: int, sequences: Sequence[Sequence[int]]) -> None:
        usable = [sequence for sequence in sequences if sequence and 0 <= sequence[-1] < self._vocab_size]
        width = max((len(sequence) for sequence in usable), default=1) - 1
        # Right-aligned; -1 stands for "any token", which makes sequences of different lengths one comparison.
        prefixes = np.full((len(usable), width), -1, dtype=np.int32)
        for row, sequence in zip(prefixes, usable, strict=True):
            if len(sequence) > 1:
                row[width - len(sequence) + 1 :] = sequence[:-1]
        self._prefixes[slot] = prefixes
        self._last_tokens[slot] = np.array([sequence[-1] for sequence in usable], dtype=np.int64)

    def remove(self, slot: int) -> None:
        self._prefixes.pop(slot, None)
        self._last_tokens.pop(slot, None)

    def banned(self, slot: int, output: HostArray) -> HostArray:
        """Tokens int64[m] that may not follow `output` int32[t], the answer so far."""
        prefixes = self._prefixes[slot]
        width = prefixes.shape[1]
        tail = np.full(width, -2, dtype=np.int32)
        recent = output[max(0, len(output) - width) :]
        if len(recent):
            tail[width - len(recent) :] = recent
        matches = ((prefixes == tail) | (prefixes == -1)).all(axis=1)
        last_tokens: HostArray = self._last_tokens[slot][matches]
        return last_tokens


@dataclass(frozen=True)
class TokenMasks:
    """The tokens that k of the rows of logits may draw. rows int32[k] on the host, ascending; words int32[k, w]: bit i
    of word j stands for token 32j+i."""

    rows: HostArray
    words: HostArray


def apply_masks(logits: torch.Tensor, masks: TokenMasks) -> None:
    """Set what `masks` does not allow to -inf, in place. logits float32[n, v]; there are words for all of v."""
    words = torch.from_numpy(masks.words).to(logits.device, non_blocking=True)
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    forbidden = ((words.unsqueeze(-1) >> shifts) & 1) == 0
    forbidden = forbidden.view(len(masks.words), -1)[:, : logits.shape[-1]]
    if len(masks.rows) == len(logits):
        logits.masked_fill_(forbidden, -torch.inf)
        return
    rows = torch.from_numpy(masks.rows.astype(np.int64)).to(logits.device, non_blocking=True)
    logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)


def add_bias(logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, values: torch.Tensor) -> None:
    """logits[rows, tokens] += values, in place."""
    logits.index_put_((rows, tokens), values, accumulate=True)


def forbid(logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    """logits[rows, tokens] = -inf, in place."""
    logits.index_put_((rows, tokens), torch.tensor(-torch.inf, device=logits.device))


def allow_only(logits: torch.Tensor, restricted: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    """Set rows `restricted` int64[r] to -inf except for (rows, tokens), in place."""
    kept = logits[rows, tokens]
    logits[restricted] = -torch.inf
    logits[rows, tokens] = kept
