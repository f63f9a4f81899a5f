"""Answers read by parsers under test: cut into pieces, put together again, broken at random."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmkit.hookspecs.reasoning_parser import ReasoningParser
from llmkit.hookspecs.tool_parser import ToolDelta, ToolFormat, ToolParser

TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer", "minimum": 0, "maximum": 20},
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                    "wind": {"type": "boolean"},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "limit": {"type": "number"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "filter": {"type": "object"},
                },
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "noop"}},
)
"""Tools of a request: parameters of every type, some of which must be given; and one without any."""


@dataclass(frozen=True)
class ReadAnswer:
    """What a parser made of an answer. calls: name and arguments of each."""

    content: str
    calls: tuple[tuple[str, str], ...]


def read_calls(parser: ToolParser, pieces: Iterable[str]) -> ReadAnswer:
    """The answer in `pieces`, put together from the deltas, which are checked to be in order."""
    content: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    for delta in _deltas(parser, pieces):
        assert isinstance(delta, ToolDelta), f"a {type(delta).__name__} was returned, not a ToolDelta"
        content.append(delta.content)
        for call in delta.tool_calls:
            if call.name is not None:
                assert call.index == len(names), f"call {call.index} begins after {len(names)} calls"
                names.append(call.name)
                arguments.append([])
            assert call.index == len(names) - 1, "a piece of a call that is not the last to have begun"
            arguments[call.index].append(call.arguments)
    return ReadAnswer("".join(content), tuple(zip(names, map("".join, arguments), strict=True)))


def _deltas(parser: ToolParser, pieces: Iterable[str]) -> Iterator[ToolDelta]:
    for piece in pieces:
        yield parser.feed(piece)
    yield parser.finish()


def read_with(tool_format: ToolFormat, text: str, tools: Sequence[Mapping[str, Any]] = TOOLS) -> ReadAnswer:
    """The answer in one piece."""
    return read_calls(tool_format.parser(tools), [text])


def read_reasoning(parser: ReasoningParser, pieces: Iterable[str]) -> tuple[str, str]:
    """(reasoning, content) of the answer in `pieces`."""
    deltas = [*(parser.feed(piece) for piece in pieces), parser.finish()]
    return "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas)


def cuts(text: str, random_: random.Random, times: int = 4) -> Iterator[list[str]]:
    """`text` in pieces: characters, two halves at random places, pieces of random lengths, some of them empty."""
    yield list(text)
    for _ in range(times):
        place = random_.randrange(len(text) + 1)
        yield [text[:place], text[place:]]
        longest = random_.choice((2, 5, 20))
        pieces, start = [], 0
        while start < len(text):
            end = start + random_.randint(0, longest)
            pieces.append(text[start:end])
            start = end
        yield pieces


def mutated(text: str, random_: random.Random) -> str:
    """`text` with a few places deleted, doubled, replaced or swapped."""
    for _ in range(random_.randint(1, 4)):
        start = random_.randrange(len(text) + 1)
        end = min(len(text), start + random_.choice((1, 1, 2, 5, 30)))
        part = text[start:end]
        junk = random_.choice(
            ("", part * 2, part[::-1], '"', "\\", "}", "{", "]", "<", "\x00", "\ud7ff", "'''", "\\u12")
        )
        text = text[:start] + junk + text[end:]
    return text
