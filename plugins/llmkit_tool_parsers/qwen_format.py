"""`<tool_call><function=NAME><parameter=NAME>value</parameter>…</function></tool_call>`"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmkit.answers.arriving_text import BLANKS, Markers, Waiting, Write
from llmkit.answers.tools import is_strict
from llmkit.hookspecs.tool_parser import ToolFormat, ToolParser
from llmkit.requests.structured_outputs import StructuredOutputs
from llmkit_tool_parsers.answer_parts import GeneratorParser
from llmkit_tool_parsers.json_values import members
from llmkit_tool_parsers.marks import Format, Tool, const, one_of, quoted, schema, sequence, tag, tagged_calls
from llmkit_tool_parsers.schema_types import json_of, properties_of, required_of, types_of

START, END = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
MAX_NAME_CHARS = 256
STRING = frozenset({"string"})

_OUTSIDE = Markers(START, FUNCTION)
_INSIDE = Markers(START, FUNCTION, END)
_VALUE_END = Markers(END_PARAMETER)
_NAME = re.compile(r"[^<>\s]+")
_AFTER_VALUE = (PARAMETER, END_FUNCTION, END, FUNCTION)
_LOOK_AHEAD = 48


class QwenFormat(ToolFormat):
    def parser(self, tools: Sequence[Mapping[str, Any]]) -> ToolParser:
        return QwenParser({tool["function"]["name"]: properties_of(tool) for tool in tools})

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str, parallel: bool) -> StructuredOutputs | None:
        return tagged_calls(tools, choice, parallel, _tag, START, "\n")

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        return "\n".join(
            f"{START}\n{FUNCTION}{name}>\n{''.join(map(_written, members(arguments)))}{END_FUNCTION}\n{END}"
            for name, arguments in calls
        )


def _written(member: tuple[str, str]) -> str:
    name, value = member
    text = json.loads(value) if value.startswith('"') else value
    return f"{PARAMETER}{name}>\n{text}\n{END_PARAMETER}\n"


def _tag(tool: Tool, free: bool) -> Format:
    begin = f"{START}\n{FUNCTION}{tool['function']['name']}>\n"
    if free and not is_strict(tool):
        return tag(begin, {"type": "any_text"}, f"{END_FUNCTION}\n{END}")
    required = required_of(tool)
    parameters = [_parameter(name, one, name in required) for name, one in properties_of(tool).items()]
    return tag(begin, sequence(*parameters, const(f"{END_FUNCTION}\n")), END)


def _parameter(name: str, given: Any, required: bool) -> Format:
    """A text stands there as it is: its length and pattern are not enforced, and it cannot hold the end mark."""
    texts = given.get("enum") if isinstance(given, Mapping) else None
    if "string" not in types_of(given):
        value = schema(given)
    elif isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
        value = one_of([const(text) for text in texts])
    else:
        value = {"type": "any_text"}
    one = tag(f"{PARAMETER}{name}>\n", value, f"\n{END_PARAMETER}\n")
    return one if required else {"type": "optional", "content": one}


class QwenParser(GeneratorParser):
    """`<tool_call>` and the end marks may be missing, as they are now and then. properties: of each tool."""

    def __init__(self, properties: Mapping[str, Mapping[str, Any]]) -> None:
        self._properties = properties
        super().__init__()

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
            if marker == START:
                yield from text.take_all(BLANKS)
            if marker == FUNCTION or (yield from text.take(FUNCTION)):
                inside = yield from self._function()
            else:
                self.give_back()

    def _function(self) -> Waiting[bool]:
        """What follows `<function=`; whether a call was begun."""
        text = self.answer
        name: list[str] = []
        yield from text.take_all(_NAME, name.append, MAX_NAME_CHARS)
        if not name or not (yield from text.take(">")):
            self.give_back()
            return False
        text.recorded()
        called = "".join(name)
        self.parts.begin(called)
        self.parts.arguments("{")
        if (yield from self._parameters(self._properties.get(called, {}))):
            self.parts.arguments("}")
            yield from text.take_all(BLANKS)
        return True

    def _parameters(self, properties: Mapping[str, Any]) -> Waiting[bool]:
        """Up to the end mark of the function, or where it should have stood; False if the text ends before."""
        text, separator = self.answer, ""
        while True:
            yield from text.take_all(BLANKS)
            text.record()
            if not (yield from text.take(PARAMETER)):
                if not (yield from text.take(END_FUNCTION)) and (yield from self._is_cut()):
                    return False
                text.recorded()
                return True
            pieces: list[str] = []
            yield from text.take_all(_NAME, pieces.append, MAX_NAME_CHARS)
            closed = yield from text.take(">")
            if not closed and not (yield from text.peek()):
                return False
            if not pieces or not closed:
                self.parts.arguments("}")
                self.parts.text(text.recorded())
                return True
            text.recorded()
            name = "".join(pieces)
            prefix = f"{separator}{quoted(name)}: "
            if not (yield from self._value(prefix, types_of(properties.get(name, {"type": "string"})))):
                return False
            separator = ", "

    def _is_cut(self) -> Waiting[bool]:
        """Whether the text ends here, perhaps within a mark."""
        rest = yield from self.answer.ahead(len(PARAMETER) + 1)
        cut = any(mark.startswith(rest) and mark != rest for mark in _AFTER_VALUE)
        if cut:
            self.answer.advance(len(rest))
        return cut

    def _value(self, prefix: str, types: frozenset[str]) -> Waiting[bool]:
        """The value after `<parameter=NAME>`. A text is told while it arrives."""
        text = self.answer
        yield from text.take("\n")
        value = _Text(self.parts.arguments, prefix) if types == STRING else _Held(self.parts.arguments, prefix, types)
        while (yield from text.until(_VALUE_END, value.write, drop_cut=True)) is not None:
            if (yield from self._goes_on()):
                value.close()
                return True
            value.write(END_PARAMETER)
        return False

    def _goes_on(self) -> Waiting[bool]:
        """Whether the format can go on here after the end mark of a value: a value may hold that mark itself."""
        for count in range(1, _LOOK_AHEAD + 1):
            window = yield from self.answer.ahead(count)
            rest = window.lstrip()
            if any(rest.startswith(mark) for mark in _AFTER_VALUE):
                return True
            if not any(mark.startswith(rest) for mark in _AFTER_VALUE):
                return False
            if len(window) < count:
                break
        return True


class _Held:
    """A value that is told when it is complete. The line end before the end mark is layout."""

    def __init__(self, write: Write, prefix: str, types: frozenset[str]) -> None:
        self._tell = write
        self._prefix = prefix
        self._types = types
        self._pieces: list[str] = []

    def write(self, piece: str) -> None:
        self._pieces.append(piece)

    def close(self) -> None:
        self._tell(self._prefix + json_of("".join(self._pieces).removesuffix("\n"), self._types))


class _Text:
    """A text that is told piece by piece, except for a line end that may be the last."""

    def __init__(self, write: Write, prefix: str) -> None:
        self._tell = write
        self._line_end = ""
        write(f'{prefix}"')

    def write(self, piece: str) -> None:
        piece = self._line_end + piece
        self._line_end = "\n" if piece.endswith("\n") else ""
        self._tell(quoted(piece.removesuffix("\n"))[1:-1])

    def close(self) -> None:
        self._tell('"')
