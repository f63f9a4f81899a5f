"""Grammars of llguidance: an Earley parser over a lexer of derivatives, computed as far as a text needs it."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from llmkit.errors import EngineError, InvalidRequestError
from llmkit.hookspecs.structured import CompiledGrammar, Grammar, GrammarCompiler, GrammarRequest
from llmkit_structured.guidance_source import lark, source_of
from llmkit_structured.request_text import PARAM, UnsupportedRequest, invalid

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from llmkit.frontend.token_vocabulary import TokenVocabulary
    from llmkit_structured.guidance import GuidanceOptions

_SIZE_BYTES = 1 << 20
_LIMITS = ("parser error", "lexer error")
"""How messages of the library begin, in capitals or not, where a limit of its own is exceeded; its stop reason is not
always so exact."""


class GuidanceCompiler(GrammarCompiler):
    """Everything that llguidance enforces exactly. Its grammars do not travel: they are compiled again, in
    milliseconds, and with the interpreter free."""

    def __init__(self, vocabulary: TokenVocabulary, options: GuidanceOptions) -> None:
        self._vocabulary = vocabulary
        self._forbid_undeclared = options.undeclared_properties == "forbid"
        self._max_lexer_states = options.max_lexer_states
        self._tokenizer: LLTokenizer | None = None
        self._lock = Lock()

    def problems(self, request: GrammarRequest) -> list[str]:
        try:
            source_of(request, forbid_undeclared=self._forbid_undeclared)
        except UnsupportedRequest as reason:
            return [str(reason)]
        return []

    def score(self, request: GrammarRequest) -> int:
        """Lark is the library's own syntax; EBNF has to be rewritten."""
        return 10 if request.kind == "grammar" and "::=" not in request.source else 0

    def warm_up(self) -> None:
        self._tokens()

    def compile(self, request: GrammarRequest) -> bytes:
        self._matcher(request)
        return b""

    def load(self, request: GrammarRequest, compiled: bytes) -> CompiledGrammar:  # noqa: ARG002 - they do not travel
        return CompiledMatcher(self._matcher(request), self._vocabulary)

    def _matcher(self, request: GrammarRequest) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        try:
            source = source_of(request, forbid_undeclared=self._forbid_undeclared)
        except UnsupportedRequest as reason:
            raise invalid([str(reason)]) from None
        if request.kind == "grammar":
            source = _readable(source)
        limits = LLParserLimits(max_lexer_states=self._max_lexer_states, verbose_errors=False)
        matcher = LLMatcher(self._tokens(), source, log_level=0, limits=limits)
        if matcher.is_error():
            raise InvalidRequestError(f"llguidance refuses the grammar: {_first_line(matcher)}.", param=PARAM)
        return matcher

    def _tokens(self) -> LLTokenizer:
        """The vocabulary in the library's form, made once."""
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._lock:
            if self._tokenizer is None:
                known = _Tokens(self._vocabulary)
                self._tokenizer = LLTokenizer(TokenizerWrapper(known), n_vocab=len(known.tokens))
            return self._tokenizer


class _Tokens:
    """What the library asks of a tokenizer: the bytes of each token, and some way to turn bytes into tokens. The end
    is a token of our own, behind those of the model."""

    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, vocabulary: TokenVocabulary) -> None:
        # To the library the byte 255, which no UTF-8 text has, marks special tokens.
        self.tokens = [b"" if b"\xff" in token else token for token in vocabulary.tokens] + [b"<end>"]
        self.eos_token_id = vocabulary.vocab_size
        self._ids = {token: token_id for token_id, token in enumerate(self.tokens[:-1]) if token}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes | str) -> list[int]:
        """Longest tokens first; what no token stands for is left out. Not used for masks."""
        data, found = text.encode() if isinstance(text, str) else text, []
        while data:
            size = next((n for n in range(min(self._longest, len(data)), 0, -1) if data[:n] in self._ids), 0)
            if size:
                found.append(self._ids[data[:size]])
            data = data[max(1, size) :]
        return found


def _readable(source: str) -> str:
    """A grammar in Lark's syntax, or in EBNF (`root ::= …`), which is rewritten as Lark."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return lark(any_to_lark(source))
    except Exception as error:  # whatever a parser of somebody else's raises for a malformed text
        raise InvalidRequestError(f"The grammar cannot be read: {str(error)[:300]}.", param=PARAM) from error


def _first_line(matcher: LLMatcher) -> str:
    return str(matcher.get_error()).strip().partition("\n")[0][:300]


class CompiledMatcher(CompiledGrammar):
    """A parser at the beginning of its text, of which each sequence gets a copy."""

    size_bytes = _SIZE_BYTES

    def __init__(self, matcher: LLMatcher, vocabulary: TokenVocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def start(self) -> Grammar:
        return MatcherState(self._matcher.deep_copy(), self._vocabulary)


class MatcherState(Grammar):
    """One sequence's parser. A fault within it (a limit exceeded, most of all) is permanent, and raised."""

    def __init__(self, matcher: LLMatcher, vocabulary: TokenVocabulary) -> None:
        self._matcher = matcher
        self._num_words = vocabulary.num_words
        self._num_tokens = 0
        # The library's row has a bit more, of the token for the end.
        self._mask = np.zeros(-(-(vocabulary.vocab_size + 1) // 32), dtype=np.int32)
        used = vocabulary.vocab_size % 32
        self._last_word = (1 << used) - 1 if used else -1

    def fill_bitmask(self, row: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._check()
        row[: self._num_words] = self._mask[: self._num_words]
        row[self._num_words :] = 0
        row[self._num_words - 1] &= self._last_word

    def accept(self, token_id: int) -> bool:
        accepted = self._matcher.try_consume_tokens([token_id]) == 1
        self._check()
        self._num_tokens += accepted
        return accepted

    def is_accepting(self) -> bool:
        return bool(self._matcher.is_accepting())

    def validate(self, token_ids: Sequence[int]) -> int:
        count = int(self._matcher.validate_tokens(list(token_ids)))
        self._check()
        return count

    def rollback(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= self._num_tokens:
            raise ValueError(f"cannot undo {num_tokens} of {self._num_tokens} tokens")
        self._matcher.rollback(num_tokens)
        self._check()
        self._num_tokens -= num_tokens

    def _check(self) -> None:
        if not self._matcher.is_error():
            return
        cause = _first_line(self._matcher)
        message = f"llguidance has given up on the grammar: {cause}."
        if cause.lower().startswith(_LIMITS):
            raise InvalidRequestError(message, param=PARAM)
        raise EngineError(message)
