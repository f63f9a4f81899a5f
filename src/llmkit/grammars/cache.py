"""Compiled grammars, kept by what they were compiled from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

import numpy as np

from llmkit.hookspecs.structured import CompiledGrammar, GrammarRequest

FAILURE_S = 60.0
"""How long a failure is remembered, in seconds: who sends the same grammar again gets the same answer at once."""

FAILURE_BYTES = 4096

Key = tuple[str, GrammarRequest]
"""Engine and request."""


@dataclass(frozen=True)
class ReadyGrammar:
    """A compiled grammar and its first step. row: int32[words], the tokens that may come first; not to be changed.
    accepting: whether the empty text is allowed. size_bytes: asked of `compiled` once, here, which raises whatever that
    does."""

    backend: str
    compiled: CompiledGrammar
    row: np.ndarray[tuple[int], np.dtype[np.int32]]
    accepting: bool
    size_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size_bytes", max(0, int(self.compiled.size_bytes)) + self.row.nbytes)


@dataclass(frozen=True)
class GrammarFailure:
    """Why there is no grammar. refused: the request is to blame, and no other attempt would end differently.
    overloaded: it was never its turn; sent again later, it may be. final: no other engine would have one."""

    message: str
    refused: bool = True
    overloaded: bool = False
    final: bool = False


class GrammarCache:
    """The grammars used last, up to `limit_bytes` of them by their own account; the newest stays whatever its size.
    Used with a lock of the owner's. num_hits, num_misses: lookups."""

    def __init__(self, limit_bytes: int, clock: Callable[[], float] = monotonic) -> None:
        self._limit = limit_bytes
        self._clock = clock
        self._entries: OrderedDict[Key, tuple[ReadyGrammar | GrammarFailure, int, float]] = OrderedDict()
        self.size_bytes = 0
        self.num_hits = 0
        self.num_misses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> ReadyGrammar | GrammarFailure | None:
        entry = self._entries.get(key)
        if entry is not None and isinstance(entry[0], GrammarFailure) and self._clock() > entry[2] + FAILURE_S:
            self._remove(key)
            entry = None
        if entry is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: Key, value: ReadyGrammar | GrammarFailure) -> None:
        if key in self._entries:
            self._remove(key)
        size = len(key[1].source) + (value.size_bytes if isinstance(value, ReadyGrammar) else FAILURE_BYTES)
        self._entries[key] = (value, size, self._clock())
        self.size_bytes += size
        while self.size_bytes > self._limit and len(self._entries) > 1:
            self._remove(next(iter(self._entries)))

    def _remove(self, key: Key) -> None:
        self.size_bytes -= self._entries.pop(key)[1]
