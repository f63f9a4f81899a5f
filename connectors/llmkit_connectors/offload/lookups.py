"""Which blocks of a waiting sequence are there as files: asked in a thread, answered to the step loop when it is
known."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from llmkit_connectors.offload.background import Background
from llmkit_connectors.offload.block_key import BlockKey

if TYPE_CHECKING:
    from llmkit_connectors.offload.file_tier import FileTier

_NUM_THREADS = 4
_VALID_S = 10.0  # then others may have removed files or added some
_DISTRUSTED_S = 60.0
_MOST = 4096  # bounds what sequences leave behind that never asked for their answer

Found = tuple[frozenset[bytes], ...]
"""Per KV group, the content hashes that are there."""


@dataclass(slots=True)
class _Question:
    """What was asked, and the answer once there is one. An answer holds until `valid_until`."""

    hashes: tuple[bytes, ...]
    answer: Found | None = None
    valid_until: float = float("inf")

    def covers(self, hashes: Sequence[bytes]) -> bool:
        """Whether `hashes` are the end of what was asked: the last one stands for all tokens before it."""
        return len(self.hashes) >= len(hashes) and self.hashes[-1:] == tuple(hashes[-1:])


class FileLookups:
    """Questions are known by the sequence number of who asks. Used from one thread, works in others.

    spaces: of all workers; a block is there if it is there for all of them. whole: per KV group, whether a block is
    of use only together with all before it, so that the search ends at the first that is missing.
    """

    def __init__(self, files: FileTier, whole: Sequence[bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._files = files
        self._whole = tuple(whole)
        self._clock = clock
        self._questions: OrderedDict[int, _Question] = OrderedDict()
        self._distrusted: dict[BlockKey, float] = {}
        self._threads = Background("look-up", _NUM_THREADS)

    def is_pending(self, sequence_number: int) -> bool:
        """Whether the sequence has asked and has no answer yet."""
        question = self._questions.get(sequence_number)
        return question is not None and question.answer is None

    def ask(self, sequence_number: int, spaces: Sequence[bytes], hashes: Sequence[bytes]) -> Found | None:
        """Which of `hashes`, in the order of the sequence, are there in each KV group; None: not known yet."""
        question = self._questions.get(sequence_number)
        if question is None or not question.covers(hashes) or self._clock() > question.valid_until:
            question = self._questions[sequence_number] = _Question(tuple(hashes))
            self._threads.submit(partial(self._search, question, tuple(spaces)))
            while len(self._questions) > _MOST:
                self._questions.popitem(last=False)
        if question.answer is None or not self._distrusted:
            return question.answer
        return tuple(
            frozenset(one for one in found if not self._is_distrusted(BlockKey(group, one)))
            for group, found in enumerate(question.answer)
        )

    def forget(self, sequence_number: int) -> None:
        """The sequence does not ask any more, or is to get a new answer."""
        self._questions.pop(sequence_number, None)

    def distrust(self, key: BlockKey) -> None:
        """The block could not be loaded although it was there: do not say so again for a while."""
        now = self._clock()
        self._distrusted = {known: until for known, until in self._distrusted.items() if until > now}
        self._distrusted[key] = now + _DISTRUSTED_S

    def clear(self) -> None:
        """Forget all questions and answers."""
        self._questions.clear()

    def close(self) -> None:
        """Stop. May be called twice."""
        self._threads.close(0.0)

    def _is_distrusted(self, key: BlockKey) -> bool:
        return self._distrusted.get(key, 0.0) > self._clock()

    def _search(self, question: _Question, spaces: tuple[bytes, ...]) -> None:
        found: Found = tuple(frozenset() for _ in self._whole)
        try:
            found = tuple(
                frozenset(self._files.find(spaces, group, question.hashes, only_leading=whole))
                for group, whole in enumerate(self._whole)
            )
        finally:
            question.valid_until = self._clock() + _VALID_S
            question.answer = found
