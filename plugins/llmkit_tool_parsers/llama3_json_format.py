"""`{"name": …, "parameters": {…}}`, several separated by `; `, perhaps after `<|python_tag|>`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmkit.answers.arriving_text import BLANKS, Markers, Waiting
from llmkit.answers.tools import tool_names
from llmkit.hookspecs.tool_parser import ToolFormat, ToolParser
from llmkit.requests.structured_outputs import StructuredOutputs
from llmkit_tool_parsers.answer_parts import GeneratorParser
from llmkit_tool_parsers.json_call import JsonCall
from llmkit_tool_parsers.marks import Format, Tool, arguments_format, quoted, tag, tagged_calls

TAG = "<|python_tag|>"
_MARKERS = Markers(TAG, "{")
_SEPARATORS = re.compile(r"[ \t\r\n;,]+")


class Llama3JsonFormat(ToolFormat):
    def parser(self, tools: Sequence[Mapping[str, Any]]) -> ToolParser:
        return Llama3JsonParser(tool_names(tools))

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str, parallel: bool) -> StructuredOutputs | None:
        return tagged_calls(tools, choice, parallel, _tag, '{"name": ', "; ")

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        return "; ".join(f'{{"name": {quoted(name)}, "parameters": {arguments}}}' for name, arguments in calls)


def _tag(tool: Tool, free: bool) -> Format:
    begin = f'{{"name": {quoted(tool["function"]["name"])}, "parameters": '
    return tag(begin, arguments_format(tool, free=free), "}")


class Llama3JsonParser(GeneratorParser):
    """JSON may as well be the answer itself: without the tag an object is a call only if it stands at the beginning of
    a line, or right after another call, and names a tool. What turns out to be something else is content, and is not
    searched for calls again."""

    def __init__(self, known: frozenset[str]) -> None:
        self._known = known
        super().__init__()

    def read(self) -> Waiting[None]:
        text = self.answer
        while True:
            marker = yield from text.until(_MARKERS, self.parts.text)
            if marker is None:
                return
            if marker == TAG or self.parts.at_line_start:
                yield from self._calls(marker)
            else:
                self.parts.text(marker)

    def _calls(self, marker: str) -> Waiting[None]:
        text = self.answer
        text.record(marker)
        marked = marker == TAG
        if marked:
            yield from text.take_all(BLANKS)
        opened = not marked
        while True:
            call = JsonCall(text, self.parts, None if marked else self._known)
            whole = yield from call.read(opened=opened)
            if not call.begun:
                self.give_back()
                return
            if not whole:
                return
            text.record()
            yield from text.take_all(_SEPARATORS)
            following = yield from text.peek()
            if following != "{":
                separators = text.recorded()
                self.parts.text(separators if following else "")
                return
            opened = False
