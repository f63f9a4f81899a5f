"""`[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name{…}[TOOL_CALLS]name[ARGS]{…}`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from llmkit.answers.arriving_text import BLANKS, Markers, Waiting
from llmkit.answers.tools import tool_names
from llmkit.hookspecs.tool_parser import ToolFormat, ToolParser
from llmkit.requests.structured_outputs import StructuredOutputs
from llmkit_tool_parsers.answer_parts import GeneratorParser
from llmkit_tool_parsers.json_call import JsonCall
from llmkit_tool_parsers.json_values import copy_container
from llmkit_tool_parsers.marks import (
    Format,
    Tool,
    arguments_format,
    chosen,
    const,
    one_of,
    quoted,
    sequence,
    structural,
    tag,
    writes_freely,
)

MARK, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MAX_NAME_CHARS = 256

_MARKED = Markers(MARK)
_NAME = re.compile(r"[\w.-]+")
_BETWEEN = re.compile(r"[ \t\r\n,]+")


class MistralFormat(ToolFormat):
    """The mark is a control token, which no grammar can have: what a grammar makes the model write begins after it, and
    is read without it if it names a tool."""

    needs_special_tokens = True

    def __init__(self, layout: Literal["list", "named"]) -> None:
        self._layout = layout

    def parser(self, tools: Sequence[Mapping[str, Any]]) -> ToolParser:
        return MistralParser(tool_names(tools))

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str, parallel: bool) -> StructuredOutputs | None:
        if writes_freely(tools, choice, parallel) or choice == "auto":
            return None
        tags = [self._tag(tool) for tool in chosen(tools, choice)]
        calls = one_of(tags)
        if parallel and self._layout == "list":
            calls = {"type": "tags_with_separator", "tags": tags, "separator": ", ", "at_least_one": True}
        return structural(sequence(const("["), calls, const("]")) if self._layout == "list" else calls)

    def _tag(self, tool: Tool) -> Format:
        name, arguments = tool["function"]["name"], arguments_format(tool, free=False)
        if self._layout == "named":
            return tag(f"{name}{ARGS}", arguments, "")
        return tag(f'{{"name": {quoted(name)}, "arguments": ', arguments, "}")

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        if self._layout == "named":
            return "".join(f"{MARK}{name}{ARGS}{arguments}" for name, arguments in calls)
        objects = (f'{{"name": {quoted(name)}, "arguments": {arguments}}}' for name, arguments in calls)
        return f"{MARK}[{', '.join(objects)}]"


class MistralParser(GeneratorParser):
    """After the mark a call is meant, whatever its name; without it, at the beginning of the answer only, tools."""

    def __init__(self, known: frozenset[str]) -> None:
        self._known = known
        super().__init__()

    def read(self) -> Waiting[None]:
        text = self.answer
        text.record()
        yield from text.take_all(BLANKS)
        if not (yield from text.is_next(MARK)):
            yield from self._calls(self._known)
        else:
            self.give_back()
        while (yield from text.until(_MARKED, self.parts.text)) is not None:
            text.record(MARK)
            yield from text.take_all(BLANKS)
            yield from self._calls(None)

    def _calls(self, known: frozenset[str] | None) -> Waiting[None]:
        """A list, one object, or a name with arguments, recorded so far."""
        text = self.answer
        character = yield from text.peek()
        if character == "[":
            text.advance(1)
            yield from self._list(known)
        elif character == "{":
            yield from self._object(known)
        else:
            yield from self._named(known)

    def _object(self, known: frozenset[str] | None) -> Waiting[bool]:
        call = JsonCall(self.answer, self.parts, known)
        whole = yield from call.read(stops=(MARK,))
        if not call.begun:
            self.give_back()
        return whole

    def _list(self, known: frozenset[str] | None) -> Waiting[None]:
        text = self.answer
        yield from text.take_all(BLANKS)
        while (yield from self._object(known)):
            text.record()
            yield from text.take_all(_BETWEEN)
            if (yield from text.take("]")) or not (yield from text.peek()):
                text.recorded()
                return

    def _named(self, known: frozenset[str] | None) -> Waiting[None]:
        text = self.answer
        name: list[str] = []
        yield from text.take_all(_NAME, name.append, MAX_NAME_CHARS)
        if (yield from text.take(CALL_ID)):
            yield from text.take_all(_NAME)
        marked = yield from text.take(ARGS)
        yield from text.take_all(BLANKS)
        called = "".join(name)
        tells = called in known and marked if known is not None else bool(called)
        if not tells or (yield from text.peek()) != "{":
            self.give_back()
            return
        text.recorded()
        self.parts.begin(called)
        yield from copy_container(text, self.parts.arguments, (MARK,))
