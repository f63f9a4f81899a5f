"""Items of a response's input → messages of a chat."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from llmkit_server.errors import bad_request, unsupported
from llmkit_server.limits import MAX_ITEMS
from llmkit_server.protocol.responses import Item

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Templates know no developers: what they say is what the system says."""

_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Type of a part of a message → the field of its text."""


def input_items(given: Any) -> list[Item]:
    """The input as items, each with an id and a type. Raises ApiError."""
    if isinstance(given, str):
        if not given:
            raise bad_request("input must not be empty.", "input")
        given = [{"role": "user", "content": [{"type": "input_text", "text": given}]}]
    if not isinstance(given, list) or not given:
        raise bad_request("input must be a text or a list of items, not empty.", "input")
    if len(given) > MAX_ITEMS:
        raise bad_request(f"input may hold at most {MAX_ITEMS} items, got {len(given)}.", "input")
    return [_item(item, f"input[{i}]") for i, item in enumerate(given)]


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def _item(item: Any, where: str) -> Item:
    if not isinstance(item, dict):
        raise bad_request(f"{where} must be an object.", "input")
    kind = item.get("type", "message")
    if not isinstance(kind, str):
        raise bad_request(f"{where}.type must be a text.", "input")
    if kind not in _PREFIXES:
        raise unsupported(f"{where} is of type {kind[:64]!r}, which is not supported.", "input")
    name = item.get("id")
    return {**item, "type": kind, "id": name if isinstance(name, str) else new_id(_PREFIXES[kind])}


def messages_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """The messages that `items` are. Calls and thoughts become parts of the assistant's message beside them.

    Raises ApiError naming the place in the input; items of earlier responses have been checked and are correct.
    """
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        where = f"input[{i}]"
        match item["type"]:
            case "message":
                _add_message(messages, item, where)
            case "function_call":
                _turn(messages).setdefault("tool_calls", []).append(_call(item, where))
            case "function_call_output":
                messages.append(_call_output(item, where))
            case _:
                _add_reasoning(messages, item, where)
    return messages


def _turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that goes on."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _add_message(messages: list[dict[str, Any]], item: Item, where: str) -> None:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_request(f"{where}.role must be one of {', '.join(_ROLES)}.", "input")
    text = _text(item.get("content"), f"{where}.content")
    last = messages[-1] if messages else {}
    if role == "assistant" and last.get("role") == role and not last["content"] and not last.get("tool_calls"):
        last["content"] = text
    else:
        messages.append({"role": _ROLES[role], "content": text})


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a text or a list of parts.", "input")
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise bad_request(f"{where} must be an object with a type.", "input")
    if kind not in _TEXT_PARTS:
        raise unsupported(f"{where} is of type {kind[:64]!r}; this model reads text only.", "input")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise bad_request(f"{where}.{_TEXT_PARTS[kind]} must be a text.", "input")
    return text


def _texts(item: Mapping[str, Any], fields: Sequence[str], where: str) -> list[str]:
    values = [item.get(field) for field in fields]
    for field, value in zip(fields, values, strict=True):
        if not isinstance(value, str):
            raise bad_request(f"{where}.{field} must be a text.", "input")
    return [str(value) for value in values]


def _call(item: Item, where: str) -> dict[str, Any]:
    call_id, name, arguments = _texts(item, ("call_id", "name", "arguments"), where)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _call_output(item: Item, where: str) -> dict[str, Any]:
    (call_id,) = _texts(item, ("call_id",), where)
    return {"role": "tool", "tool_call_id": call_id, "content": _text(item.get("output"), f"{where}.output")}


def _add_reasoning(messages: list[dict[str, Any]], item: Item, where: str) -> None:
    """Reasoning whose text is not there (only encrypted, or none) tells a model nothing."""
    texts = []
    for field, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = item.get(field)
        if parts is None:
            continue
        if not isinstance(parts, list):
            raise bad_request(f"{where}.{field} must be a list of parts.", "input")
        for j, part in enumerate(parts):
            if not isinstance(part, dict) or part.get("type") != kind or not isinstance(part.get("text"), str):
                raise bad_request(f"{where}.{field}[{j}] must be of type {kind} and have a text.", "input")
            texts.append(part["text"])
        if texts:
            break
    if texts:
        messages.append({"role": "assistant", "content": "", "reasoning_content": "\n".join(texts)})
