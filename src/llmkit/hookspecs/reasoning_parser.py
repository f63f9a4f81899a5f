"""Kind `reasoning_parser`: how a family of models marks what it thinks before it answers.

The server asks for one `ReasoningFormat` at its start and for one `ReasoningParser` per answer. What the parser calls
content goes on to the tool parser.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmkit.hookspecs.markers import hookspec

if TYPE_CHECKING:
    from pydantic import BaseModel

    from llmkit.requests.structured_outputs import StructuredOutputs


@dataclass(frozen=True)
class ReasoningDelta:
    """What a piece of text has brought."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser(ABC):
    """Reads one answer. It never raises, takes time in proportion to the text's length, and loses nothing but the
    markers and the blanks beside them. The result must not depend on where the text was cut into pieces."""

    @abstractmethod
    def feed(self, text: str) -> ReasoningDelta:
        """Take the next piece of the answer, of any length. What may be part of a marker is kept until that is sure."""

    @abstractmethod
    def finish(self) -> ReasoningDelta:
        """The answer has ended: what was kept. Called once, last. Reasoning that was never closed is reasoning."""


class ReasoningFormat(ABC):
    """How reasoning is marked. Used from any thread; has no state.

    needs_special_tokens: whether the markers are special tokens, so that the parser must be given a text that shows
    them (`skip_special_tokens=False`).
    """

    needs_special_tokens: bool = False

    @abstractmethod
    def parser(self, prompt_tail: str) -> ReasoningParser:
        """A parser for one answer. prompt_tail: the end of the prompt's text, at least the last 64 characters (all of
        a shorter prompt): a chat template may have opened the block already, or closed it."""

    @abstractmethod
    def constraint(self, answer: StructuredOutputs, prompt_tail: str) -> StructuredOutputs:
        """`answer`, which constrains the content, made to allow the reasoning before it. prompt_tail: as for
        `parser`."""

    @abstractmethod
    def written(self, reasoning: str, content: str) -> str:
        """An answer as a model writes it, with the block opened by the model itself where that is usual, for a prompt
        that ends in nothing of interest. The parser reads this back, and so does the conformance suite."""


@hookspec(firstresult=True)
def llmkit_reasoning_format(options: BaseModel | None) -> ReasoningFormat:  # type: ignore[empty-body]
    """Build the format. `options` is an instance of `info.options`, validated; None if there is none.

    .. versionadded:: 0.1
    """


@hookspec(firstresult=True)
def llmkit_reasoning_format_fits(chat_template: str) -> bool:  # type: ignore[empty-body]
    """Whether a model with this chat template (Jinja source) certainly marks its reasoning in this way.

    "auto" takes a format whose answer is True; without this hook a format is used only when it is named. To be
    asked about a template must cost next to nothing.

    .. versionadded:: 0.1
    """
