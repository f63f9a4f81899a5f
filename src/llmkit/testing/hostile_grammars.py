"""A grammar engine for tests: follows choices, byte by byte, and on demand does everything that an engine must not.

Register the module itself: `registry.register("structured", "hostile", hostile_grammars)`. A choice's text decides
what goes wrong: `!spin`, `!memory`, `!abort`, `!segfault`, `!exit`, `!raise`, `!refuse` while it is compiled; `!load`
in `load`, `!size` behind it; `!start` in `start`; `!mask`, `!panic`, `!accept`, `!deny`, `!slow` (sleeps), `!busy`
(for so long that it should not come to that), `!hang` (until `go_on` is set) once the answer has begun.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from llmkit.errors import InvalidRequestError
from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.hookspecs.structured import CompiledGrammar, Grammar, GrammarCompiler, GrammarRequest

if TYPE_CHECKING:
    from typing import Any

    from llmkit.frontend.token_vocabulary import TokenVocabulary

SLOW_S, BUSY_S = 0.05, 0.2
go_on = threading.Event()

info = PluginInfo(summary="for tests: follows choices, and misbehaves on demand", auto=False)


class Panic(BaseException):
    """What a panic in Rust becomes in Python: no Exception."""


class ChoiceGrammar(Grammar):
    """The text is one of `choices`."""

    def __init__(self, choices: tuple[bytes, ...], vocabulary: TokenVocabulary) -> None:
        self._choices = choices
        self._vocabulary = vocabulary
        self._texts = [b""]

    @property
    def _text(self) -> bytes:
        return self._texts[-1]

    def _misbehaves(self, how: str) -> bool:
        return len(self._texts) > 1 and f"!{how}".encode() in self._choices

    def fill_bitmask(self, row: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        if self._misbehaves("mask"):
            raise RuntimeError("no mask today")
        if self._misbehaves("limit"):
            raise InvalidRequestError("a limit is exceeded", param="structured_outputs")
        if self._misbehaves("panic"):
            raise Panic("index out of bounds")
        if self._misbehaves("slow"):
            time.sleep(SLOW_S)
        if self._misbehaves("hang"):
            go_on.wait()
        if self._misbehaves("busy"):
            end = time.thread_time() + BUSY_S
            while time.thread_time() < end:
                pass
        allowed = np.zeros(len(row) * 32, dtype=np.uint8)
        for token_id, data in enumerate(self._vocabulary.tokens):
            allowed[token_id] = bool(data) and self._is_beginning(self._text + data)
        row[:] = np.packbits(allowed, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> bool:
        if self._misbehaves("accept"):
            raise RuntimeError("not accepted today")
        text = self._text + self._vocabulary.tokens[token_id]
        if self._misbehaves("deny") or not self._vocabulary.tokens[token_id] or not self._is_beginning(text):
            return False
        self._texts.append(text)
        return True

    def is_accepting(self) -> bool:
        return self._text in self._choices

    def validate(self, token_ids: Sequence[int]) -> int:
        text = self._text
        for i, token_id in enumerate(token_ids):
            text += self._vocabulary.tokens[token_id]
            if not self._vocabulary.tokens[token_id] or not self._is_beginning(text):
                return i
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        del self._texts[len(self._texts) - num_tokens :]

    def _is_beginning(self, text: bytes) -> bool:
        return any(choice.startswith(text) for choice in self._choices)


class CompiledChoices(CompiledGrammar):
    """Starts as many as are wanted."""

    def __init__(self, choices: tuple[bytes, ...], vocabulary: TokenVocabulary) -> None:
        self._choices = choices
        self._vocabulary = vocabulary
        self._num_starts = 0

    def start(self) -> Grammar:
        self._num_starts += 1
        if b"!start" in self._choices and self._num_starts > 1:
            raise RuntimeError("no start today")
        return ChoiceGrammar(self._choices, self._vocabulary)


class HostileCompiler(GrammarCompiler):
    """Knows choices only."""

    def __init__(self, vocabulary: TokenVocabulary) -> None:
        self._vocabulary = vocabulary
        self._pid = os.getpid()

    def problems(self, request: GrammarRequest) -> list[str]:
        return [] if request.kind == "choice" else [f"It knows choices only, not {request.kind}."]

    def compile(self, request: GrammarRequest) -> bytes:
        for choice in json.loads(request.source):
            act = _ACTS.get(choice)
            if act is not None:
                act()
        return request.source.encode()

    def load(self, request: GrammarRequest, compiled: bytes) -> CompiledGrammar:
        choices = json.loads(compiled)
        assert choices == json.loads(request.source)
        if "!load" in choices and os.getpid() == self._pid:
            raise RuntimeError("not loaded today")
        grammar = CompiledChoices(tuple(choice.encode() for choice in choices), self._vocabulary)
        if "!size" in choices:
            grammar.size_bytes = "large"  # type: ignore[assignment]
        return grammar


def _spin() -> None:
    while True:
        pass


def _fill_memory() -> None:
    held = []
    while True:
        held.append(bytearray(16 << 20))


def _raise() -> None:
    raise RuntimeError("not compiled today")


def _refuse() -> None:
    raise InvalidRequestError("nobody shall say this")


_ACTS = {
    "!spin": _spin,
    "!memory": _fill_memory,
    "!abort": os.abort,
    "!segfault": lambda: ctypes.string_at(0),
    "!exit": lambda: os._exit(3),
    "!raise": _raise,
    "!refuse": _refuse,
}


@hookimpl
def llmkit_grammar_compiler(vocabulary: TokenVocabulary) -> GrammarCompiler:
    return HostileCompiler(vocabulary)
