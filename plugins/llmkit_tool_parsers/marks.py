"""What several formats have in common: the written forms of calls, and the grammars made of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmkit.answers.tools import is_strict, parameters_of
from llmkit.requests.structured_outputs import StructuredOutputs

Tool = Mapping[str, Any]
Format = dict[str, Any]


def const(text: str) -> Format:
    """A structural format: exactly this text."""
    return {"type": "const_string", "value": text}


def sequence(*elements: Format) -> Format:
    """A structural format: one after the other."""
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": list(elements)}


def one_of(elements: Sequence[Format]) -> Format:
    """A structural format: any one of them."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def tag(begin: str, content: Format, end: str) -> Format:
    """A structural format: content between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def schema(value: Any) -> Format:
    """A structural format: JSON of a schema."""
    return {"type": "json_schema", "json_schema": value}


def arguments_format(tool: Tool, *, free: bool) -> Format:
    """JSON of a tool's arguments; free: any object, unless the tool is strict."""
    return schema({"type": "object"} if free and not is_strict(tool) else parameters_of(tool))


def chosen(tools: Sequence[Tool], choice: str) -> list[Tool]:
    """The tools that may be called."""
    named = [tool for tool in tools if tool["function"]["name"] == choice]
    return named or list(tools)


def writes_freely(tools: Sequence[Tool], choice: str, parallel: bool) -> bool:
    """Whether nothing is asked that would take a grammar."""
    return choice == "auto" and parallel and not any(map(is_strict, tools))


def structural(form: Format) -> StructuredOutputs:
    """The constraint that an answer has this form."""
    return StructuredOutputs(structural_tag={"type": "structural_tag", "format": form})


def tagged_calls(
    tools: Sequence[Tool],
    choice: str,
    parallel: bool,
    tag_of: Callable[[Tool, bool], Format],
    trigger: str,
    separator: str,
) -> StructuredOutputs | None:
    """The constraint of a format in which every call is a tag of its own.

    tag_of: the tag of a tool; its second argument says whether arguments are free. trigger: what all tags begin with.
    separator: between calls where there must be some and nothing else.
    """
    if writes_freely(tools, choice, parallel):
        return None
    if choice == "auto":
        tags = [tag_of(tool, True) for tool in tools]
        return structural(
            {"type": "triggered_tags", "triggers": [trigger], "tags": tags, "stop_after_first": not parallel}
        )
    tags = [tag_of(tool, False) for tool in chosen(tools, choice)]
    if not parallel:
        return structural(one_of(tags))
    return structural({"type": "tags_with_separator", "tags": tags, "separator": separator, "at_least_one": True})


def quoted(text: str) -> str:
    """As a JSON string."""
    return json.dumps(text, ensure_ascii=False)
