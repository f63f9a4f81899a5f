"""/v1/messages, in the shapes of Anthropic's API."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import Field

from llmkit.requests import sampling_params as sampling
from llmkit_server.limits import MAX_MESSAGES, MAX_TOOLS
from llmkit_server.protocol.base import RequestBody, integer, nullable, number

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    501: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_BLOCK = {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]}
_CONTENT: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK}]}
_MESSAGE: dict[str, Any] = {
    "type": "object",
    "properties": {"role": {"enum": ["user", "assistant"]}, "content": _CONTENT},
    "required": ["role", "content"],
}
_TOOL: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "description": {"type": "string"}, "input_schema": {"type": "object"}},
    "required": ["name", "input_schema"],
}
_TOOL_CHOICE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"enum": ["auto", "any", "tool", "none"]},
        "name": {"type": "string"},
        "disable_parallel_tool_use": {"type": "boolean"},
    },
    "required": ["type"],
}


class MessagesPrompt(RequestBody):
    """What makes the prompt of a message; the body of `count_tokens`."""

    messages: Any = Field(
        json_schema_extra={"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": MAX_MESSAGES}
    )
    system: Any = nullable(_CONTENT)
    tools: Any = nullable(type="array", items=_TOOL, maxItems=MAX_TOOLS)
    tool_choice: Any = nullable(_TOOL_CHOICE)
    thinking: Any = nullable(
        type="object", properties={"type": {"enum": ["enabled", "disabled", "adaptive"]}}, required=["type"]
    )


class MessagesRequest(MessagesPrompt):
    """A conversation to be answered."""

    max_tokens: Any = Field(json_schema_extra={"type": "integer", "minimum": 1, "maximum": sampling.MAX_TOKENS})
    stop_sequences: Any = nullable(
        type="array", items={"type": "string", "minLength": 1}, maxItems=sampling.MAX_STOP_STRINGS
    )
    stream: bool | None = None
    temperature: Any = number(0, 2)
    top_p: Any = number(0, 1, exclusiveMinimum=0)
    top_k: Any = integer(-1, sampling.MAX_TOP_K)
    metadata: Any = nullable(type="object", properties={"user_id": {"type": ["string", "null"]}})
    output_config: Any = nullable(type="object")
    service_tier: Any = nullable(type="string")


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """signature: nothing is signed here; thoughts come back as they are."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct):
    """input_tokens: of the prompt, without those that the prefix cache held (`cache_read_input_tokens`)."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class Message(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    model: str
    content: list[Block]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    role: str = "assistant"


class TokenCount(msgspec.Struct):
    input_tokens: int


class MessageErrorDetail(msgspec.Struct):
    type: str
    message: str


class MessageError(msgspec.Struct, tag_field="type", tag="error", omit_defaults=True):
    """The body of every response that is no success, and the data of an error's event."""

    error: MessageErrorDetail
    request_id: str | None = None


def error_body(status: int, message: str, param: str | None, request_id: str | None = None) -> MessageError:
    """An error of a status. The field that is to blame is named in the message."""
    text = message if param is None or param in message else f"{param}: {message}"
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    return MessageError(MessageErrorDetail(kind, text), request_id)
