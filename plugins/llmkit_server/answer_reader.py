"""The text of an answer, divided into reasoning, content and tool calls, as it comes."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmkit_server.protocol.chat import FunctionCall, ToolCall

if TYPE_CHECKING:
    from llmkit.hookspecs.reasoning_parser import ReasoningParser
    from llmkit.hookspecs.tool_parser import ToolCallDelta, ToolParser


@dataclass
class AnswerParts:
    """What a piece of text has brought. tool_calls: news of calls, with index; a call begins with id, type and name."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


class AnswerReader:
    """For one answer. Without parsers, text is content.

    parallel: whether there may be several calls; those behind the first are left out otherwise.
    shows_reasoning: whether the client wants to see it.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        *,
        parallel: bool = True,
        shows_reasoning: bool = True,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._parallel = parallel
        self._shows_reasoning = shows_reasoning
        self.has_called = False

    def feed(self, text: str, *, is_end: bool = False) -> AnswerParts:
        """Take the next piece; `is_end`: the last one."""
        parts = AnswerParts()
        content = text
        if self._reasoning is not None:
            deltas = [self._reasoning.feed(text)] if text else []
            deltas += [self._reasoning.finish()] if is_end else []
            content = "".join(delta.content for delta in deltas)
            if self._shows_reasoning:
                parts.reasoning = "".join(delta.reasoning for delta in deltas)
        if self._tools is None:
            parts.content = content
            return parts
        found = [self._tools.feed(content)] if content else []
        found += [self._tools.finish()] if is_end else []
        parts.content = "".join(delta.content for delta in found)
        parts.tool_calls = self._calls([call for delta in found for call in delta.tool_calls])
        return parts

    def _calls(self, deltas: Sequence[ToolCallDelta]) -> list[ToolCall]:
        calls = []
        for delta in deltas:
            if delta.index > 0 and not self._parallel:
                continue
            self.has_called = True
            function = FunctionCall(arguments=delta.arguments, name=delta.name)
            if delta.name is None:
                calls.append(ToolCall(function, index=delta.index))
            else:
                calls.append(ToolCall(function, index=delta.index, id=f"call_{uuid.uuid4().hex[:24]}", type="function"))
        return calls


def whole_calls(pieces: Sequence[ToolCall]) -> list[ToolCall]:
    """The calls that `pieces` make up, without indices, as they stand in a message."""
    calls: dict[int | None, ToolCall] = {}
    for piece in pieces:
        call = calls.get(piece.index)
        if call is None:
            function = FunctionCall(arguments=piece.function.arguments, name=piece.function.name)
            calls[piece.index] = ToolCall(function, id=piece.id, type=piece.type)
        else:
            call.function.arguments += piece.function.arguments
    return list(calls.values())
