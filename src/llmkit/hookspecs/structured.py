"""Kind `structured`: grammar engines that constrain what is sampled.

Life of a grammar, call by call:

1. `GrammarCompiler.problems(request)` while the request is still at the door: what cannot be expressed is refused
   there, or goes to another engine. `score(request)` says how well the engine suits it. Where the source is large, or
   an engine before this one has failed, it is asked in the child process of 2.
2. `GrammarCompiler.compile(request)` in a child process that is killed when it takes too long or too much memory.
   What it returns travels as bytes. The child then tries them: `load`, `start`, a first `fill_bitmask`.
3. `GrammarCompiler.load(request, compiled)` in a thread of the engine's process, once; the result is kept in a cache.
4. `CompiledGrammar.start()` for each sequence, then `accept` and `fill_bitmask` once a token, in a thread for which a
   step waits a moment.

Stop tokens are the core's business: a grammar sees the tokens of the text and nothing else. The core forbids every
stop token while `is_accepting` is False, allows them where it is True, and ends the answer by itself once the text is
complete and nothing may follow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from llmkit.hookspecs.markers import hookspec

if TYPE_CHECKING:
    import numpy as np
    from pydantic import BaseModel

    from llmkit.frontend.token_vocabulary import TokenVocabulary

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"]


@dataclass(frozen=True)
class GrammarRequest:
    """What to compile. Equal requests share one compiled grammar.

    source, by kind: json_schema: JSON text of the schema. json_object: "" (any JSON object). regex: the whole text
    must match. choice: JSON text of a list of texts. grammar: EBNF or Lark text. structural_tag: JSON text.

    For the JSON kinds: max_whitespace: most blanks (space, tab, newline) that may stand in a row between two tokens of
    JSON; an engine that cannot count allows none, or only a fixed layout. disable_any_whitespace: a fixed layout, with
    at most one space after a colon or comma. whitespace_pattern: regular expression of what may stand there instead.
    After the last brace nothing may follow.
    """

    kind: GrammarKind
    source: str
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    max_whitespace: int = 32


class Grammar(ABC):
    """State of one sequence's grammar. Used by one thread at a time, not always the same: calls must take well under a
    millisecond as a rule, and let go of the interpreter where they may take longer. What raises ends its request.
    An InvalidRequestError says that the request is to blame, as when its grammar exceeds a limit of the library; of
    anything else, more than a few in a row open the engine's circuit breaker.
    """

    @abstractmethod
    def fill_bitmask(self, row: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        """Write the tokens that keep the text a beginning of an allowed one as bits into `row`
        int32[ceil(vocab_size / 32)], bit i of word w: token 32w+i; every word is written, bits beyond the vocabulary
        are 0. Special tokens have no text and are never allowed."""

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Advance by a sampled token; False, with the state unchanged, if the grammar does not allow it (the request
        then fails). Never called with a stop token that ends the answer."""

    @abstractmethod
    def is_accepting(self) -> bool:
        """Whether the text so far is complete as it stands, so that the answer may end here."""

    @abstractmethod
    def validate(self, token_ids: Sequence[int]) -> int:
        """How many of the drafted tokens are allowed in a row from here; the state does not change."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""


class CompiledGrammar(ABC):
    """A compiled grammar, from which any number of sequences start. Lives in the engine's process.

    size_bytes: what it takes of the cache; an estimate will do.
    """

    size_bytes: int = 1 << 20

    @abstractmethod
    def start(self) -> Grammar:
        """A fresh state at the beginning of the text. A step may wait for it: must be quick."""

    def release(self) -> None:  # noqa: B027 - most have nothing to do
        """Let go of what takes long to free, with the interpreter free. Called once, in a thread beside the step loop,
        when neither this nor a state from it is used any more; then it is dropped.

        .. versionadded:: 0.1
        """


class GrammarCompiler(ABC):
    """Compiles grammars for one vocabulary.

    Building one must be cheap (milliseconds, no import of the library): the frontend builds it only to ask for
    `problems`. What costs is made by `warm_up`, or on the first `compile` or `load`.
    """

    @abstractmethod
    def problems(self, request: GrammarRequest) -> list[str]:
        """What of `request` this engine cannot express exactly, a sentence each, naming the keyword or construct and
        where it stands; empty if nothing. A text that would pass the grammar and break the request's own rules (a
        keyword that the library ignores) is a problem. `request.source` is JSON where it must be, and nothing else is
        known of it. May be called from any thread, for every request: no library calls that may take long. What may
        take long here calls `llmkit.grammars.effort.spend` on the way, and lets through what that raises: then the
        engine is asked in the child process. Raises InvalidRequestError for what is malformed, whoever reads it.
        """

    def score(self, request: GrammarRequest) -> int:
        """How well the engine suits a request it has no problems with: "auto" takes the highest score, then the
        highest `PluginInfo.rank`. 0: nothing speaks for or against it."""
        return 0

    def warm_up(self) -> None:  # noqa: B027 - most have something to do, none must
        """Import the library and build what all grammars share, so that no `compile` or `load` has to. Called once in
        the compile process, before it forks a child for each `compile`: must leave no thread behind. Also called in the
        engine's process before it takes requests (`structured.preload_grammars`)."""

    @abstractmethod
    def compile(self, request: GrammarRequest) -> bytes:
        """Compile in a child process that has nothing else to do. Raises InvalidRequestError for what the engine
        refuses; anything else that is raised is a fault of the plugin and fails the request too.

        The bytes are what `load` needs. An engine whose grammars cannot travel returns b"": the child has shown then
        that the source is harmless, and `load` compiles it again.
        """

    @abstractmethod
    def load(self, request: GrammarRequest, compiled: bytes) -> CompiledGrammar:
        """The grammar of `compiled`, which `compile` has returned for the same request, usually in another process.

        Runs in a thread beside the step loop, so it should not keep the interpreter to itself for long.
        """


@hookspec(firstresult=True)
def llmkit_grammar_compiler(options: BaseModel | None, vocabulary: TokenVocabulary) -> GrammarCompiler:  # type: ignore[empty-body]
    """Build the compiler. `options` is an instance of `info.options`, validated; None if there is none.

    Called in the engine's process and in the compile process; `vocabulary` is the same in both.

    .. versionadded:: 0.1
    """
