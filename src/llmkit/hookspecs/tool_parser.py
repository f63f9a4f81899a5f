"""Kind `tool_parser`: a format in which models write tool calls: reading it from a text that arrives in pieces, and a
grammar that makes a model write it.

The server asks for one `ToolFormat` at its start and for one `ToolParser` per answer. A parser gets the answer's text,
detokenised and without stop strings, and divides it into content and calls. The result must not depend on where the
text was cut into pieces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmkit.hookspecs.markers import hookspec

if TYPE_CHECKING:
    from pydantic import BaseModel

    from llmkit.requests.structured_outputs import StructuredOutputs


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a call. index: which call of the answer, from 0. name: in the first piece of a call, None in the
    others. arguments: what is new of the JSON text of the arguments; all pieces of a call make up that text."""

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True)
class ToolDelta:
    """What a piece of text has brought: text that belongs to no call, and pieces of calls."""

    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class ToolParser(ABC):
    """Reads one answer. It never raises, whatever the text is, and takes time in proportion to its length.

    Text that is no call comes back as content. Calls with a name and the beginning of their arguments are begun, and
    end where the text ends if the model was cut off; what was begun is not taken back. In an answer with calls, blanks
    at the beginning and at the end of the content may be left out, in one without calls nothing may.
    """

    @abstractmethod
    def feed(self, text: str) -> ToolDelta:
        """Take the next piece of the answer, of any length. What cannot be told yet is kept until it can."""

    @abstractmethod
    def finish(self) -> ToolDelta:
        """The answer has ended: what was kept. Called once, last."""


class ToolFormat(ABC):
    """How a family of models writes calls. Used from any thread; has no state.

    needs_special_tokens: whether the format is marked with special tokens, so that the parser must be given a text
    that shows them (`skip_special_tokens=False`).

    `tools` are those of the request in the form of OpenAI's API: `{"type": "function", "function": {"name": …,
    "parameters": JSON schema, …}}`, checked by the caller (`llmkit.answers.tools.function_tools`).
    """

    needs_special_tokens: bool = False

    @abstractmethod
    def parser(self, tools: Sequence[Mapping[str, Any]]) -> ToolParser:
        """A parser for one answer to a request with these tools."""

    @abstractmethod
    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str, parallel: bool) -> StructuredOutputs | None:
        """A grammar of answers in this format, None if the model is to write freely.

        choice: "auto": text with or without calls; "required": at least one call; the name of a tool: calls of that
        one. "auto" and "required" are never names here. parallel: whether there may be several calls. Whatever the
        grammar allows, the parser must read back as calls whose arguments meet the tools' schemas, as far as the
        format can express them. Raises InvalidRequestError (param "tools") for schemas that it cannot write.
        """

    @abstractmethod
    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls, each a name and the JSON text of its arguments, as a model writes them. The parser reads this back,
        and so does the conformance suite."""


@hookspec(firstresult=True)
def llmkit_tool_format(options: BaseModel | None) -> ToolFormat:  # type: ignore[empty-body]
    """Build the format. `options` is an instance of `info.options`, validated; None if there is none.

    .. versionadded:: 0.1
    """


@hookspec(firstresult=True)
def llmkit_tool_format_fits(chat_template: str) -> bool:  # type: ignore[empty-body]
    """Whether a model with this chat template (Jinja source) certainly writes its calls in this format.

    "auto" takes a format whose answer is True; without this hook a format is used only when it is named. To be
    asked about a template must cost next to nothing.

    .. versionadded:: 0.1
    """
