"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmkit.answers.arriving_text import BLANKS, Markers, Waiting
from llmkit.hookspecs.tool_parser import ToolFormat, ToolParser
from llmkit.requests.structured_outputs import StructuredOutputs
from llmkit_tool_parsers.answer_parts import GeneratorParser
from llmkit_tool_parsers.json_call import JsonCall
from llmkit_tool_parsers.marks import Format, Tool, arguments_format, quoted, tag, tagged_calls

START, END = "<tool_call>", "</tool_call>"
_OUTSIDE, _INSIDE = Markers(START), Markers(START, END)
_LEFT_OVER = re.compile(r"[ \t\r\n}]+")


class HermesFormat(ToolFormat):
    def parser(self, tools: Sequence[Mapping[str, Any]]) -> ToolParser:  # noqa: ARG002 - the marks leave no doubt
        return HermesParser()

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str, parallel: bool) -> StructuredOutputs | None:
        return tagged_calls(tools, choice, parallel, _tag, START, "\n")

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        return "\n".join(
            f'{START}\n{{"name": {quoted(name)}, "arguments": {arguments}}}\n{END}' for name, arguments in calls
        )


def _tag(tool: Tool, free: bool) -> Format:
    begin = f'{START}\n{{"name": {quoted(tool["function"]["name"])}, "arguments": '
    return tag(begin, arguments_format(tool, free=free), f"}}\n{END}")


class HermesParser(GeneratorParser):
    """Marked text that is no call is content, marks included. A call may lack its last brace or its end mark."""

    def read(self) -> Waiting[None]:
        text, inside = self.answer, False
        while True:
            marker = yield from text.until(_INSIDE if inside else _OUTSIDE, self.parts.text, drop_cut=inside)
            if marker is None:
                return
            if marker == END:
                inside = False
                continue
            text.record(marker)
            yield from text.take_all(BLANKS)
            call = JsonCall(text, self.parts, known=None)
            yield from call.read(stops=(START, END))
            inside = call.begun
            if inside:
                yield from text.take_all(_LEFT_OVER)
            else:
                self.give_back()
