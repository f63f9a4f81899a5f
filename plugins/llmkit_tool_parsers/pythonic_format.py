"""`[name(parameter=value, …), …]`"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmkit.answers.arriving_text import BLANKS, ArrivingText, Markers, Waiting, Write
from llmkit.answers.tools import tool_names
from llmkit.errors import InvalidRequestError
from llmkit.hookspecs.tool_parser import ToolFormat, ToolParser
from llmkit.requests.structured_outputs import StructuredOutputs
from llmkit_tool_parsers.answer_parts import GeneratorParser
from llmkit_tool_parsers.json_values import members
from llmkit_tool_parsers.marks import (
    Format,
    Tool,
    chosen,
    const,
    one_of,
    quoted,
    schema,
    sequence,
    structural,
    tag,
    writes_freely,
)
from llmkit_tool_parsers.python_literals import json_of_literal
from llmkit_tool_parsers.schema_types import properties_of, required_of

MAX_NAME_CHARS = 256
MAX_BRACKETS = 64

_MARKERS = Markers("[")
_NAME = re.compile(r"[\w.-]+")
_PLAIN = re.compile(r"""[^"'()\[\]{},\\]+""")
_IN_TEXT = re.compile(r"""[^"'\\\n]+""")
_CLOSES = {")": "(", "]": "[", "}": "{"}


class PythonicFormat(ToolFormat):
    def parser(self, tools: Sequence[Mapping[str, Any]]) -> ToolParser:
        return PythonicParser(tool_names(tools))

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str, parallel: bool) -> StructuredOutputs | None:
        """Values are written in JSON, which the parser knows as well as Python's notation. There is no telling text
        from calls by a mark, so that a free choice cannot be constrained."""
        if writes_freely(tools, choice, parallel) or choice == "auto":
            return None
        tags = [_call(tool) for tool in chosen(tools, choice)]
        if not parallel:
            return structural(sequence(const("["), one_of(tags), const("]")))
        calls = {"type": "tags_with_separator", "tags": tags, "separator": ", ", "at_least_one": True}
        return structural(sequence(const("["), calls, const("]")))

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        texts = (
            f"{name}({', '.join(f'{parameter}={value}' for parameter, value in members(arguments))})"
            for name, arguments in calls
        )
        return f"[{', '.join(texts)}]"


def _call(tool: Tool) -> Format:
    """The required parameters in their order, then any of the others in theirs."""
    properties, required = properties_of(tool), required_of(tool)
    for name in properties:
        if not name.isidentifier():
            raise InvalidRequestError(
                f"The parameter {name!r} of the tool {tool['function']['name']!r} is no Python name, so that a model "
                "cannot be made to write it in pythonic calls.",
                param="tools",
            )
    first = [_argument(name, given) for name, given in properties.items() if name in required]
    others = [_argument(name, given) for name, given in properties.items() if name not in required]
    parts = [part for i, one in enumerate(first) for part in ((const(", "), one) if i else (one,))]
    following = [_optional(sequence(const(", "), one)) for one in others]
    if first:
        parts += following
    elif others:
        starts = [sequence(one, *following[i + 1 :]) for i, one in enumerate(others)]
        parts.append(_optional(one_of(starts)))
    return tag(f"{tool['function']['name']}(", sequence(*parts, const(")")), "")


def _optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def _argument(name: str, given: Any) -> Format:
    return sequence(const(f"{name}="), schema(given))


class PythonicParser(GeneratorParser):
    """A list is a list of calls only at the beginning of a line, and as long as it names tools. A call is told when it
    is complete; of the one at which the text breaks off, the arguments that are."""

    def __init__(self, known: frozenset[str]) -> None:
        self._known = known
        super().__init__()

    def read(self) -> Waiting[None]:
        text = self.answer
        while (yield from text.until(_MARKERS, self.parts.text)) is not None:
            if not self.parts.at_line_start:
                self.parts.text("[")
                continue
            text.record("[")
            yield from text.take_all(BLANKS)
            while (yield from self._call()):
                text.record()
                yield from text.take_all(BLANKS)
                yield from text.take(",")
                yield from text.take_all(BLANKS)
                if (yield from text.take("]")) or not (yield from text.peek()):
                    text.recorded()
                    break
            self.give_back()

    def _call(self) -> Waiting[bool]:
        """One call, told if it is one; False if not, or if the text ends."""
        text = self.answer
        pieces: list[str] = []
        yield from text.take_all(_NAME, pieces.append, MAX_NAME_CHARS)
        name = "".join(pieces)
        if name not in self._known or not (yield from text.take("(")):
            return False
        arguments: dict[str, str] = {}
        while True:
            yield from text.take_all(BLANKS)
            if (yield from text.take(")")):
                self._tell(name, arguments, "}")
                return True
            argument: list[str] = []
            parameter = yield from self._parameter()
            closed = parameter is not None and (yield from _value(text, argument.append))
            if not (yield from text.peek()) and not closed:
                self._tell(name, arguments, "")
                return False
            value = json_of_literal("".join(argument)) if closed and parameter not in arguments else None
            if value is None or parameter is None:
                return False
            arguments[parameter] = value
            yield from text.take(",")

    def _parameter(self) -> Waiting[str | None]:
        text = self.answer
        pieces: list[str] = []
        yield from text.take_all(_NAME, pieces.append, MAX_NAME_CHARS)
        yield from text.take_all(BLANKS)
        return "".join(pieces) if pieces and (yield from text.take("=")) else None

    def _tell(self, name: str, arguments: Mapping[str, str], end: str) -> None:
        if not arguments and not end:
            return
        self.answer.recorded()
        self.parts.begin(name)
        members = ", ".join(f"{quoted(parameter)}: {value}" for parameter, value in arguments.items())
        self.parts.arguments(f"{{{members}{end}")


def _value(text: ArrivingText, write: Write) -> Waiting[bool]:
    """Copy the source of a value up to the comma or parenthesis after it, which is not read. False if the text ends
    before, or brackets do not fit."""
    opened: list[str] = []
    while True:
        yield from text.take_all(_PLAIN, write)
        character = yield from text.peek()
        if not character:
            return False
        if character in "\"'":
            if not (yield from _copy_text(text, write)):
                return False
        elif not opened and character in ",)":
            return True
        elif character in _CLOSES:
            if not opened or opened.pop() != _CLOSES[character]:
                return False
            write(text.advance(1))
        elif character == "\\" or (character in "([{" and len(opened) >= MAX_BRACKETS):
            return False
        else:
            if character in "([{":
                opened.append(character)
            write(text.advance(1))


def _copy_text(text: ArrivingText, write: Write) -> Waiting[bool]:
    quote = yield from text.peek()
    triple = yield from text.is_next(quote * 3)
    end = quote * 3 if triple else quote
    write(text.advance(len(end)))
    while True:
        yield from text.take_all(_IN_TEXT, write)
        character = yield from text.peek()
        if character and character in "\"'" and (yield from text.is_next(end)):
            write(text.advance(len(end)))
            return True
        if not character or (character == "\n" and not triple):
            return False
        write(text.advance(1))
        if character == "\\":
            if not (yield from text.peek()):
                return False
            write(text.advance(1))
