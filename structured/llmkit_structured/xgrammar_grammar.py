"""Grammars of XGrammar: an Earley parser whose masks for whole tokens are computed ahead."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from llmkit.errors import InvalidRequestError
from llmkit.hookspecs.structured import CompiledGrammar, Grammar, GrammarCompiler, GrammarRequest
from llmkit_structured.request_text import PARAM, UnsupportedRequest, invalid
from llmkit_structured.xgrammar_source import Source, source_of

if TYPE_CHECKING:
    import xgrammar

    from llmkit.frontend.token_vocabulary import TokenVocabulary


Words = np.ndarray[Any, np.dtype[np.int32]]


class XGrammarCompiler(GrammarCompiler):
    """What `xgrammar_source` can write. Compiled grammars can be sent, but that takes longer than to compile them: the
    source travels, and the library compiles it again with the interpreter free. Where it was compiled, to be tried, it
    is not compiled again."""

    def __init__(self, vocabulary: TokenVocabulary) -> None:
        self._vocabulary = vocabulary
        self._compiler: xgrammar.GrammarCompiler | None = None
        self._lock = Lock()
        self._tried: tuple[Source, xgrammar.CompiledGrammar] | None = None

    def problems(self, request: GrammarRequest) -> list[str]:
        try:
            source_of(request)
        except UnsupportedRequest as reason:
            return [str(reason)]
        return []

    def warm_up(self) -> None:
        self._made()

    def compile(self, request: GrammarRequest) -> bytes:
        try:
            source = source_of(request)
        except UnsupportedRequest as reason:
            raise invalid([str(reason)]) from None
        self._tried = source, self._compiled(source)
        return json.dumps([source.notation, source.text]).encode()

    def load(self, request: GrammarRequest, compiled: bytes) -> CompiledGrammar:  # noqa: ARG002 - it is all in `compiled`
        source = Source(*json.loads(compiled))
        tried, self._tried = self._tried, None
        made = tried[1] if tried is not None and tried[0] == source else self._compiled(source)
        return CompiledXGrammar(made, self._vocabulary.stop_token_id, self._text)

    @cached_property
    def _text(self) -> Words:
        """The tokens that are text, as bits: the library also sets bits of its stop token and beyond the vocabulary."""
        allowed = np.zeros(self._vocabulary.num_words * 32, dtype=np.uint8)
        allowed[: self._vocabulary.vocab_size] = [bool(token) for token in self._vocabulary.tokens]
        allowed[self._vocabulary.stop_token_id] = 0
        return np.packbits(allowed, bitorder="little").view(np.int32)

    def _compiled(self, source: Source) -> xgrammar.CompiledGrammar:
        compiler = self._made()
        try:
            if source.notation == "ebnf":
                return compiler.compile_grammar(source.text)
            if source.notation == "lark":
                return compiler.compile_lark(source.text)
            return compiler.compile_structural_tag(source.text)
        except RuntimeError as error:
            if _is_out_of_memory(error):
                raise
            raise InvalidRequestError(f"xgrammar refuses the grammar: {_reason(error)}.", param=PARAM) from error

    def _made(self) -> xgrammar.GrammarCompiler:
        """The library's compiler with the vocabulary in its form, made once."""
        import xgrammar

        with self._lock:
            if self._compiler is None:
                tokens = xgrammar.TokenizerInfo(
                    list(self._vocabulary.tokens),
                    xgrammar.VocabType.RAW,
                    vocab_size=self._vocabulary.vocab_size,
                    stop_token_ids=[self._vocabulary.stop_token_id],
                )
                # One thread: a compilation is never in a hurry, the step loop always is. The cache is the core's.
                self._compiler = xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)
            return self._compiler


def _is_out_of_memory(error: RuntimeError) -> bool:
    return "bad_alloc" in str(error) or "length_error" in str(error)


def _reason(error: RuntimeError) -> str:
    """The library's message without time, file and line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].rpartition(".cc:")[2].partition(": ")[2].strip().rstrip(".")[:300] or lines[-1][:300]


class CompiledXGrammar(CompiledGrammar):
    """A compiled grammar of the library. text: the tokens that are text, as bits."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, stop_token_id: int, text: Words) -> None:
        self._compiled = compiled
        self._stop_token_id = stop_token_id
        self._text = text
        self.size_bytes = int(compiled.memory_size_bytes)

    def start(self) -> Grammar:
        import xgrammar

        return MatcherState(xgrammar.GrammarMatcher(self._compiled), self._stop_token_id, self._text)

    def release(self) -> None:
        """The destructor would keep the interpreter, for more than a millisecond a megabyte; a call does not."""
        import tvm_ffi

        last = tvm_ffi.List([self._compiled._handle])
        del self._compiled
        last.clear()


class MatcherState(Grammar):
    """One sequence's matcher. The library has a stop token that it allows at the end; here nothing knows of it."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, stop_token_id: int, text: Words) -> None:
        self._matcher = matcher
        self._stop_token_id = stop_token_id
        self._text = text

    def fill_bitmask(self, row: Words) -> None:
        if self._matcher.fill_next_token_bitmask(row.reshape(1, -1), 0):
            row &= self._text
        else:
            row[:] = self._text  # everything is allowed, and the row has not been written

    def accept(self, token_id: int) -> bool:
        return token_id != self._stop_token_id and bool(self._matcher.accept_token(token_id))

    def is_accepting(self) -> bool:
        return bool(self._matcher.is_completed())

    def validate(self, token_ids: Sequence[int]) -> int:
        count = 0
        for token_id in token_ids:
            if not self.accept(token_id):
                break
            count += 1
        self.rollback(count)
        return count

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)
