"""Bodies of responses → chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmkit_server.body import parse_body
from llmkit_server.chat_extras import chat_extras
from llmkit_server.errors import bad_request, unsupported
from llmkit_server.limits import MAX_ITEMS, MAX_METADATA, MAX_METADATA_KEY_CHARS, MAX_METADATA_VALUE_CHARS
from llmkit_server.protocol.chat import ChatRequest
from llmkit_server.protocol.responses import Item, ResponseRequest
from llmkit_server.responses.items import messages_of

NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "response_format": "text",
}
"""Fields of the engine's request, and of chats → those of a response."""

_MORE = frozenset({"stop", "include_stop_str_in_output", "spaces_between_special_tokens"})

LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
"""The second is what stateless clients always ask for; reasoning is not encrypted here, and its text is there."""


def client_names(body: ResponseRequest) -> dict[str, str]:
    """NAMES, and by which field the answer was constrained."""
    if "structured_outputs" in (body.model_extra or {}):
        return NAMES
    return {**NAMES, "structured_outputs": "text"}


def check_fields(body: ResponseRequest) -> None:
    """Raises ApiError for what is wrong by itself or not supported."""
    for name in ("conversation", "prompt", "context_management"):
        if getattr(body, name) is not None:
            raise unsupported(f"{name} is not supported.", name)
    for name in ("instructions", "previous_response_id"):
        if not isinstance(getattr(body, name), str | None):
            raise bad_request(f"{name} must be a text.", name)
    if body.stream_options is not None and not body.streams:
        raise bad_request("stream_options goes with stream: true only.", "stream_options")
    if not isinstance(body.stream_options, dict | None):
        raise bad_request("stream_options must be an object.", "stream_options")
    if body.background and body.store is False:
        raise bad_request("background needs a response that is stored: store must not be false.", "store")
    if body.truncation not in (None, "auto", "disabled"):
        raise bad_request("truncation must be auto or disabled.", "truncation")
    calls = body.max_tool_calls
    if calls is not None and (isinstance(calls, bool) or not isinstance(calls, int) or not 1 <= calls < 2**31):
        raise bad_request("max_tool_calls must be a positive integer.", "max_tool_calls")
    _check_metadata(body.metadata)
    _check_include(body.include)


def _check_metadata(given: Any) -> None:
    if given is None:
        return
    if (
        not isinstance(given, dict)
        or len(given) > MAX_METADATA
        or not all(len(key) <= MAX_METADATA_KEY_CHARS for key in given)
        or not all(isinstance(value, str) and len(value) <= MAX_METADATA_VALUE_CHARS for value in given.values())
    ):
        raise bad_request(
            f"metadata must be an object of at most {MAX_METADATA} texts of at most {MAX_METADATA_VALUE_CHARS} "
            f"characters, under keys of at most {MAX_METADATA_KEY_CHARS}.",
            "metadata",
        )


def _check_include(given: Any) -> None:
    if given is not None and (not isinstance(given, list) or not all(value in _INCLUDABLE for value in given)):
        raise bad_request(f"include must be a list of {' and '.join(_INCLUDABLE)}.", "include")


def wants_logprobs(body: ResponseRequest) -> bool:
    return LOGPROBS in (body.include or ()) or body.top_logprobs is not None


def chat_of(body: ResponseRequest, items: Sequence[Item]) -> ChatRequest:
    """The chat that a body asks for. items: what went before, and the input. Raises ApiError naming the field."""
    if len(items) > MAX_ITEMS:
        raise bad_request(f"input, with all that went before, may hold at most {MAX_ITEMS} items.", "input")
    messages = messages_of(items)
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    if not messages:
        raise bad_request("input holds nothing to answer.", "input")
    tools, choice = tools_and_choice(body)
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "tools": [_chat_tool(tool, i) for i, tool in enumerate(tools)] or None,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "response_format": response_format(body.text),
        "user": body.user or body.safety_identifier,
        "stream": True,
        **_reasoning(body.reasoning),
    }
    if wants_logprobs(body):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    return parse_body({**chat_extras(body.model_extra or {}, "responses", _MORE), **fields}, ChatRequest)


def _reasoning(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    effort = given.get("effort") if isinstance(given, dict) else 0
    if not isinstance(effort, str | None):
        raise bad_request("reasoning must be an object whose effort is a text.", "reasoning")
    return {"reasoning_effort": effort}


def response_format(text: Any) -> dict[str, Any] | None:
    """`text.format` as chats have it."""
    if text is None:
        return None
    given = text.get("format") if isinstance(text, dict) else 0
    if given is None:
        return None
    if not isinstance(given, dict):
        raise bad_request("text must be an object whose format is an object with a type.", "text")
    match given.get("type"):
        case "json_schema":
            if "schema" not in given:
                raise bad_request("text.format of type json_schema needs a schema.", "text")
            inner = {name: given[name] for name in ("name", "schema", "strict") if name in given}
            return {"type": "json_schema", "json_schema": inner}
        case "text" | "json_object":
            return {"type": given["type"]}
    raise bad_request("text.format.type must be text, json_object or json_schema.", "text")


def tools_and_choice(body: ResponseRequest) -> tuple[list[Any], Any]:
    """The tools that the model may call, and the choice among them."""
    tools, choice = body.tools, body.tool_choice
    if not isinstance(tools, list | None):
        raise bad_request("tools must be a list.", "tools")
    tools = tools or []
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed, mode = choice.get("tools"), choice.get("mode", "auto")
        if not isinstance(allowed, list) or not all(isinstance(tool, dict) for tool in allowed):
            raise bad_request("tool_choice.tools must be a list of objects that name tools.", "tool_choice")
        if mode not in ("auto", "required"):
            raise bad_request("tool_choice.mode must be auto or required.", "tool_choice")
        names = [tool.get("name") for tool in allowed]
        return [tool for tool in tools if isinstance(tool, dict) and tool.get("name") in names], mode
    return tools, choice


def _chat_tool(tool: Any, number: int) -> dict[str, Any]:
    where = f"tools[{number}]"
    if not isinstance(tool, dict):
        raise bad_request(f"{where} must be an object.", "tools")
    if tool.get("type") != "function":
        raise unsupported(f"{where} is of type {str(tool.get('type'))[:64]!r}; only functions are supported.", "tools")
    function: Mapping[str, Any] = {
        name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None
    }
    return {"type": "function", "function": dict(function)}
