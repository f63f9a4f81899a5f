"""The messages of a chat: checked, and brought to the form that templates expect."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llmkit.errors import InvalidRequestError


class TemplateLimitError(InvalidRequestError):
    """A chat template has exceeded what one may do: in time, in memory, or in what it reaches for."""


_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


def normalised_messages(messages: Any, *, keep_parts: bool) -> list[dict[str, Any]]:
    """Copies of `messages` with text content.

    Null or absent content becomes "". Lists of text parts are joined by newlines, unless `keep_parts` (the template
    reads lists itself). Tool call arguments given as JSON text become mappings, as templates expect.
    Raises InvalidRequestError (param "messages") for anything that is no list of messages.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise _refused(f"messages must be a list of messages, got {type(messages).__name__}.")
    if not messages:
        raise _refused("messages must not be empty.")
    return [_normalised(message, i, keep_parts) for i, message in enumerate(messages)]


def with_final_content(chat: list[dict[str, Any]], mark: str) -> list[dict[str, Any]]:
    """`chat` with `mark` appended to the final message's text."""
    content = chat[-1]["content"]
    if isinstance(content, str):
        marked: Any = content + mark
    elif content:
        marked = [*content[:-1], {**content[-1], "text": content[-1]["text"] + mark}]
    else:
        marked = mark
    return [*chat[:-1], {**chat[-1], "content": marked}]


def text_length(messages: Iterable[Mapping[str, Any]]) -> int:
    """Characters of the contents of well-formed messages."""
    contents = [message.get("content") or "" for message in messages]
    return sum(
        len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content) for content in contents
    )


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages")


def _normalised(message: Any, i: int, keep_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _refused(f"messages[{i}] must be a mapping with role and content, got {type(message).__name__}.")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _refused(f"messages[{i}].role must be a text such as user, assistant or system.")
    result = dict(message)
    result["content"] = _content(message.get("content"), f"messages[{i}].content", keep_parts)
    if result.get("tool_calls"):
        result["tool_calls"] = _tool_calls(result["tool_calls"], f"messages[{i}].tool_calls")
    return result


def _content(content: Any, where: str, keep_parts: bool) -> str | list[dict[str, Any]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, (bytes, Mapping)) or not isinstance(content, Sequence):
        raise _refused(f"{where} must be text, a list of text parts or null, got {type(content).__name__}.")
    texts = [_part_text(part, f"{where}[{j}]") for j, part in enumerate(content)]
    if keep_parts:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise _refused(f"{where} must be a text part, got {type(part).__name__}.")
    kind = part.get("type", "text")
    if kind not in _TEXT_PARTS:
        raise _refused(f"{where} is of type {kind!r}; this model reads text parts only.")
    text = part.get("text")
    if not isinstance(text, str):
        raise _refused(f"{where}.text must be text.")
    return text


def _tool_calls(calls: Any, where: str) -> list[Any]:
    if isinstance(calls, (str, Mapping)) or not isinstance(calls, Sequence):
        raise _refused(f"{where} must be a list.")
    return [_tool_call(call, f"{where}[{j}]") for j, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        raise _refused(f"{where}.function.arguments must be JSON.") from None
    return {**call, "function": {**function, "arguments": arguments}}
