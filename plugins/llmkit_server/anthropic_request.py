"""Bodies of Anthropic's API → chats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from llmkit_server.body import parse_body
from llmkit_server.chat_extras import chat_extras
from llmkit_server.errors import bad_request, unsupported
from llmkit_server.limits import MAX_MESSAGES, MAX_USER_CHARS
from llmkit_server.protocol.anthropic import MessagesPrompt, MessagesRequest
from llmkit_server.protocol.chat import ChatRequest

NAMES = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "structured_outputs": "output_config",
    "user": "metadata",
}
"""Fields of the engine's request → those of a message."""

_THINKING = ("enabled", "disabled", "adaptive")


def chat_of(body: MessagesPrompt) -> ChatRequest:
    """The chat that a body asks for. Raises ApiError naming the field of the body."""
    messages = [*_system(body.system), *_messages(body.messages)]
    goes_on = messages[-1]["role"] == "assistant"
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "continue_final_message": goes_on,
        "add_generation_prompt": not goes_on,
        **_tools(body),
        **_thinking(body),
    }
    if isinstance(body, MessagesRequest):
        fields |= _sampling(body)
    return parse_body({**chat_extras(body.model_extra or {}, "messages"), **fields}, ChatRequest)


def _sampling(body: MessagesRequest) -> dict[str, Any]:
    if body.max_tokens is None:
        raise bad_request("max_tokens is needed.", "max_tokens")
    return {
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "user": _user(body.metadata),
        "response_format": _response_format(body.output_config),
    }


def _user(metadata: Any) -> str | None:
    if metadata is None:
        return None
    user = metadata.get("user_id") if isinstance(metadata, dict) else 0
    if not isinstance(user, str | None) or len(user or "") > MAX_USER_CHARS:
        raise bad_request(
            f"metadata must be an object whose user_id is a text of at most {MAX_USER_CHARS} characters.", "metadata"
        )
    return user


def _response_format(config: Any) -> dict[str, Any] | None:
    if config is None:
        return None
    given = config.get("format") if isinstance(config, dict) else 0
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("type") != "json_schema" or "schema" not in given:
        raise bad_request("output_config.format must have the type json_schema and a schema.", "output_config")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given["schema"]}}


def _thinking(body: MessagesPrompt) -> dict[str, Any]:
    """Templates of models that may or may not reason have a switch for it."""
    given = body.thinking
    if given is None:
        return {}
    kind = given.get("type") if isinstance(given, dict) else None
    if kind not in _THINKING:
        raise bad_request(f"thinking must be an object whose type is one of {', '.join(_THINKING)}.", "thinking")
    thinks = kind != "disabled"
    variables = (body.model_extra or {}).get("chat_template_kwargs")
    more = variables if isinstance(variables, dict) else {}
    return {"chat_template_kwargs": {"enable_thinking": thinks, **more}, "include_reasoning": thinks}


def _tools(body: MessagesPrompt) -> dict[str, Any]:
    if body.tools is not None and not isinstance(body.tools, list):
        raise bad_request("tools must be a list.", "tools")
    fields: dict[str, Any] = {"tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())] or None}
    choice = body.tool_choice
    if choice is None:
        return fields
    kind = choice.get("type") if isinstance(choice, dict) else None
    plain = {"auto": "auto", "any": "required", "none": "none"}
    if kind == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind in plain:
        fields["tool_choice"] = plain[kind]
    else:
        raise bad_request("tool_choice must be an object of type auto, any, tool or none.", "tool_choice")
    single = choice.get("disable_parallel_tool_use")
    if not isinstance(single, bool | None):
        raise bad_request("tool_choice.disable_parallel_tool_use must be true or false.", "tool_choice")
    return {**fields, "parallel_tool_calls": not single}


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise bad_request(f"{where} must be an object.", "tools")
    if tool.get("type", "custom") not in ("custom", None):
        raise unsupported(
            f"{where} is of type {str(tool['type'])[:64]!r}; only tools of the client's own are supported.", "tools"
        )
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema"), "strict": tool.get("strict")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _system(given: Any) -> list[dict[str, Any]]:
    if given is None:
        return []
    text = _text(given, "system", "system")
    return [{"role": "system", "content": text}] if text else []


def _messages(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise bad_request("messages must be a list of at least one message.", "messages")
    if len(given) > MAX_MESSAGES:
        raise bad_request(f"messages may hold at most {MAX_MESSAGES} messages, got {len(given)}.", "messages")
    return [message for i, one in enumerate(given) for message in _message(one, f"messages[{i}]")]


def _message(message: Any, where: str) -> Iterator[dict[str, Any]]:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant"):
        raise bad_request(f"{where} must be an object whose role is user or assistant.", "messages")
    content = message.get("content")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list):
        raise bad_request(f"{where}.content must be a text or a list of blocks.", "messages")
    blocks = list(enumerate(content))
    yield from (_assistant if role == "assistant" else _user_messages)(blocks, f"{where}.content")


def _user_messages(blocks: list[tuple[int, Any]], where: str) -> Iterator[dict[str, Any]]:
    """Results of tools are messages of their own, before what the user says."""
    texts = []
    for i, block in blocks:
        place = f"{where}[{i}]"
        if _kind(block, place) == "tool_result":
            yield _tool_result(block, place)
        else:
            texts.append(_block_text(block, place, "messages"))
    if texts or not blocks:
        yield {"role": "user", "content": "\n".join(texts)}


def _tool_result(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    name = block.get("tool_use_id")
    if not isinstance(name, str):
        raise bad_request(f"{place}.tool_use_id must be a text.", "messages")
    content = block.get("content")
    text = "" if content is None else _text(content, f"{place}.content", "messages")
    return {
        "role": "tool",
        "tool_call_id": name,
        "content": f"Error: {text}" if block.get("is_error") is True else text,
    }


def _assistant(blocks: list[tuple[int, Any]], where: str) -> Iterator[dict[str, Any]]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in blocks:
        place, kind = f"{where}[{i}]", _kind(block, f"{where}[{i}]")
        if kind == "tool_use":
            calls.append(_tool_use(block, place))
        elif kind == "thinking":
            if not isinstance(block.get("thinking"), str):
                raise bad_request(f"{place}.thinking must be a text.", "messages")
            thoughts.append(block["thinking"])
        elif kind != "redacted_thinking":
            texts.append(_block_text(block, place, "messages"))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    yield message


def _tool_use(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    name, arguments = block.get("name"), block.get("input", {})
    if not isinstance(name, str) or not isinstance(block.get("id"), str) or not isinstance(arguments, dict):
        raise bad_request(f"{place} must have an id, a name and an object as input.", "messages")
    return {"id": block["id"], "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def _kind(block: Any, place: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise bad_request(f"{place} must be an object with a type.", place.partition("[")[0])
    return kind


def _text(content: Any, where: str, param: str) -> str:
    """A text, or the text of blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a text or a list of text blocks.", param)
    return "\n".join(_block_text(block, f"{where}[{i}]", param) for i, block in enumerate(content))


def _block_text(block: Any, place: str, param: str) -> str:
    kind = _kind(block, place)
    if kind != "text":
        raise bad_request(f"{place} is of type {kind[:64]!r}, which cannot stand there or is not supported.", param)
    if not isinstance(block.get("text"), str):
        raise bad_request(f"{place}.text must be a text.", param)
    return str(block["text"])
