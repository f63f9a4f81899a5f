"""/v1/responses."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from pydantic import Field

from llmkit_server.limits import MAX_ITEMS, MAX_USER_CHARS
from llmkit_server.protocol.base import TOOLS, RequestBody, StreamFields, integer, nullable, number

Item = dict[str, Any]
"""A part of a conversation: a message, a call, the result of one, reasoning."""

_INPUT: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "object"}, "minItems": 1, "maxItems": MAX_ITEMS},
    ]
}
_TOOL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "name": {"type": "string"},
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["type", "name"],
}
_CHOICE: dict[str, Any] = {"type": "object", "required": ["type"]}


class ResponseRequest(StreamFields, RequestBody):
    """input: a text or items. Besides these fields, many of chats are taken (`seed`, `top_k`, …)."""

    input: Any = Field(json_schema_extra=_INPUT)
    instructions: Any = nullable(type="string")
    previous_response_id: Any = nullable(type="string")
    store: bool | None = None
    background: bool | None = None
    stream_options: Any = nullable(type="object")
    max_output_tokens: Any = integer(1, 2**31 - 1)
    temperature: Any = number(0, 2)
    top_p: Any = number(0, 1, exclusiveMinimum=0)
    top_logprobs: Any = integer(0, 20)
    tools: Any = nullable(type="array", items=_TOOL, maxItems=TOOLS["maxItems"])
    tool_choice: Any = nullable({"enum": ["none", "auto", "required"]}, _CHOICE)
    parallel_tool_calls: bool | None = None
    max_tool_calls: Any = integer(1, 2**31 - 1)
    text: Any = nullable(type="object")
    reasoning: Any = nullable(type="object")
    include: Any = nullable(type="array", items={"type": "string"})
    metadata: Any = nullable(type="object", additionalProperties={"type": "string"})
    truncation: Any = nullable(enum=["auto", "disabled"])
    user: str | None = Field(default=None, max_length=MAX_USER_CHARS)
    safety_identifier: str | None = Field(default=None, max_length=MAX_USER_CHARS)
    prompt_cache_key: str | None = Field(default=None, max_length=MAX_USER_CHARS)
    service_tier: str | None = None
    conversation: Any = nullable(type=["object", "string"])
    prompt: Any = nullable(type="object")
    context_management: Any = nullable(type="array")


class InputTokensDetails(msgspec.Struct):
    """cache_write_tokens: those that a client would be charged for; there are none."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    """Why a response has failed. param: the field of the request that is to blame."""

    code: str
    message: str
    param: str | None = None


class ResponseObject(msgspec.Struct):
    """A response, as far as it has come. What was not said in the request stands there as it was taken to be."""

    id: str
    created_at: int
    model: str
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    user: str | None
    object: Literal["response"] = "response"
    service_tier: str = "default"
    status: str = "in_progress"
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: dict[str, str] | None = None
    output: list[Item] = msgspec.field(default_factory=list)
    usage: ResponseUsage | None = None


class ItemList(msgspec.Struct):
    """A page of the items that a response was made of."""

    object: Literal["list"]
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(msgspec.Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True
