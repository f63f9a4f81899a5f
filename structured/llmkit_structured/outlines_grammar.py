"""Grammars of outlines-core: a regular expression, compiled to an automaton whose steps are tokens.

Two habits of the library are worked around. Its automaton keeps the first of several alternatives that match, so that
`a|ab` would never become "ab"; and it also prepares for matches that start anywhere, which takes exponential time for
some bounded repetitions. So every expression stands between a first character that occurs nowhere else and an
assertion of the end; a token of our own, which is no token of the model, leads over that first character.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from llmkit.errors import InvalidRequestError
from llmkit.hookspecs.structured import CompiledGrammar, Grammar, GrammarCompiler, GrammarRequest
from llmkit_structured.regex_tree import (
    LAST,
    Chars,
    Tree,
    char_sets,
    chars,
    complement,
    intersection,
    pattern,
    replace_chars,
)
from llmkit_structured.request_text import PARAM, UnsupportedRequest, invalid, tree_of

if TYPE_CHECKING:
    from outlines_core import Guide, Index, Vocabulary

    from llmkit.frontend.token_vocabulary import TokenVocabulary

_START = chr(LAST)
"""No character by Unicode's own word, and so in no text."""

_MAX_ROLLBACK = 64
_TRAVELS = 4 << 20
"""Bytes of an automaton beyond which it is built again by `load`, which leaves the interpreter alone meanwhile;
unpacking it would not."""

_BYTES_PER_BYTE = 6
"""Memory that an automaton takes, per byte of its packed form."""


class OutlinesCompiler(GrammarCompiler):
    """Regular languages only. max_depth: see OutlinesOptions."""

    def __init__(self, vocabulary: TokenVocabulary, max_depth: int) -> None:
        self._vocabulary = vocabulary
        self._max_depth = max_depth
        self._lock = Lock()

    def problems(self, request: GrammarRequest) -> list[str]:
        try:
            tree_of(request, self._max_depth)
        except UnsupportedRequest as reason:
            return [str(reason)]
        return []

    def warm_up(self) -> None:
        _ = self._tokens

    def compile(self, request: GrammarRequest) -> bytes:
        index = self._index(request)
        packed: bytes = index.__reduce__()[1][0]
        size = len(packed).to_bytes(8, "little")
        return size + (packed if len(packed) <= _TRAVELS else b"")

    def load(self, request: GrammarRequest, compiled: bytes) -> CompiledGrammar:
        from outlines_core import Index

        index = Index.from_binary(compiled[8:]) if len(compiled) > 8 else self._index(request)
        size = int.from_bytes(compiled[:8], "little")
        return CompiledAutomaton(index, self._vocabulary, size * _BYTES_PER_BYTE)

    def _index(self, request: GrammarRequest) -> Index:
        from outlines_core import Index

        try:
            tree = tree_of(request, self._max_depth)
        except UnsupportedRequest as reason:
            raise invalid([str(reason)]) from None
        try:
            return Index(pattern_of(tree), self._tokens)
        except ValueError as error:
            raise InvalidRequestError(f"outlines-core refuses the grammar: {str(error)[:300]}.", param=PARAM) from error

    @cached_property
    def _tokens(self) -> Vocabulary:
        """The model's tokens, by their bytes, and the one that starts every text."""
        from outlines_core import Vocabulary

        start, stop = own_tokens(self._vocabulary)
        with self._lock:
            ids: dict[bytes, list[int]] = {_START.encode(): [start]}
            for token_id, token in enumerate(self._vocabulary.tokens):
                if token:
                    ids.setdefault(token, []).append(token_id)
            return Vocabulary(stop, ids)


def own_tokens(vocabulary: TokenVocabulary) -> tuple[int, int]:
    """Two ids beyond the model's: of the token before every text, and of the end, which the library insists on."""
    return vocabulary.vocab_size, vocabulary.vocab_size + 1


def pattern_of(tree: Tree) -> str:
    """`tree` as a regular expression for the library."""
    start = chars([(LAST, LAST)])
    without: dict[Chars, Tree] = {part: intersection(part, complement(start)) for part in char_sets(tree)}
    return f"{pattern(start)}(?:{pattern(replace_chars(tree, without))})\\z"


class CompiledAutomaton(CompiledGrammar):
    """An automaton, shared by all sequences."""

    def __init__(self, index: Index, vocabulary: TokenVocabulary, size_bytes: int) -> None:
        self._index = index
        self._vocabulary = vocabulary
        self.size_bytes = max(1 << 12, size_bytes)

    def start(self) -> Grammar:
        return AutomatonState(self._index, self._vocabulary)


class AutomatonState(Grammar):
    """Where a sequence is in the automaton. The library keeps a few earlier states; all tokens are kept here, and from
    them everything else is found again."""

    def __init__(self, index: Index, vocabulary: TokenVocabulary) -> None:
        from outlines_core import Guide

        self._index = index
        self._start, _ = own_tokens(vocabulary)
        self._guide: Guide = Guide(index, _MAX_ROLLBACK)
        self._guide.advance(self._start, False)
        self._tokens: list[int] = []
        # The library writes a bit for each of its tokens; ours are beyond the row of the model's.
        self._mask = np.zeros(vocabulary.num_words + 1, dtype=np.int32)
        self._num_words = vocabulary.num_words
        self._beyond = -(-vocabulary.vocab_size // 32) * 32 - vocabulary.vocab_size

    def fill_bitmask(self, row: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        self._guide.write_mask_into(self._mask.ctypes.data, self._mask.size, 4)
        row[: self._num_words] = self._mask[: self._num_words]
        row[self._num_words :] = 0
        if self._beyond:
            row[self._num_words - 1] &= (1 << (32 - self._beyond)) - 1

    def accept(self, token_id: int) -> bool:
        if self._index.get_next_state(self._guide.get_state(), token_id) is None:
            return False
        self._guide.advance(token_id, False)
        self._tokens.append(token_id)
        return True

    def is_accepting(self) -> bool:
        return bool(self._guide.is_finished())

    def validate(self, token_ids: Sequence[int]) -> int:
        state = self._guide.get_state()
        for count, token_id in enumerate(token_ids):
            state = self._index.get_next_state(state, token_id)
            if state is None:
                return count
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= len(self._tokens):
            raise ValueError(f"cannot undo {num_tokens} of {len(self._tokens)} tokens")
        del self._tokens[len(self._tokens) - num_tokens :]
        if num_tokens <= self._guide.get_allowed_rollback():
            self._guide.rollback_state(num_tokens)
            return
        self._guide.reset()
        for token_id in (self._start, *self._tokens):
            self._guide.advance(token_id, False)
