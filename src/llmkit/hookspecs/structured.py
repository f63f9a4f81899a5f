"""Kind `structured`: grammar engines that constrain what is sampled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from llmkit.hookspecs.markers import hookspec

if TYPE_CHECKING:
    import numpy as np
    from pydantic import BaseModel

    from llmkit.frontend.tokenizer import Tokenizer


@dataclass(frozen=True)
class GrammarRequest:
    """What to compile: `kind` and its source text (JSON text for json_schema, choice and structural_tag)."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"]
    source: str


class Grammar(ABC):
    """State of one request's grammar. Used by the step loop only."""

    @abstractmethod
    def fill_bitmask(self, row: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        """Write the allowed tokens as bits into `row` int32[ceil(vocabulary / 32)], bit i of word w: token 32w+i."""

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Advance by a sampled token; False if the grammar does not allow it (the request then fails)."""

    @abstractmethod
    def validate(self, token_ids: Sequence[int]) -> int:
        """How many of the drafted tokens are allowed in a row from here; the state does not change."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""

    @abstractmethod
    def is_terminated(self) -> bool:
        """Whether the text is complete: only a stop token may follow."""


class GrammarCompiler(ABC):
    """Compiles grammars for one tokenizer. `compile` runs off the step loop, possibly in several threads."""

    @abstractmethod
    def problems(self, request: GrammarRequest) -> list[str]:
        """What of `request` this engine cannot express, a sentence each; empty if nothing."""

    @abstractmethod
    def compile(self, request: GrammarRequest) -> Grammar:
        """A fresh grammar state. Raises InvalidRequestError for a malformed source."""


@hookspec(firstresult=True)
def llmkit_grammar_compiler(options: BaseModel | None, tokenizer: Tokenizer) -> GrammarCompiler:  # type: ignore[empty-body]
    """Build the compiler. `options` is an instance of `info.options`, validated; None if there is none.

    .. versionadded:: 0.1
    """
