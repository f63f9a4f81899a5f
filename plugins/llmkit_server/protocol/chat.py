"""/v1/chat/completions."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from llmkit_server.protocol.base import ChatPromptFields, GenerationBody, PromptLogprobs, Usage, integer, nullable


class ChatRequest(GenerationBody, ChatPromptFields):
    """A conversation to be answered. max_tokens is the older name of max_completion_tokens."""

    max_completion_tokens: Any = integer(1, 2**31 - 1)
    logprobs: bool | None = None
    top_logprobs: Any = integer(0, 2**31 - 1)
    tool_choice: Any = nullable({"enum": ["none", "auto", "required"]}, {"type": "object", "required": ["type"]})
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    functions: Any = nullable(type="array")
    function_call: Any = nullable(type=["string", "object"])
    modalities: Any = nullable(type="array", items={"type": "string"})


class FunctionCall(msgspec.Struct, omit_defaults=True):
    """name: only in the first piece of a streamed call. arguments: JSON text."""

    arguments: str
    name: str | None = None


class ToolCall(msgspec.Struct, omit_defaults=True):
    """A call, or in a stream its news: then with an index, and id and type only at its beginning."""

    function: FunctionCall
    index: int | None = None
    id: str | None = None
    type: str | None = None


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    """One token of the answer. bytes: what it stands for, which may be a piece of a character."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """The answer. content: null if there is nothing but tool calls."""

    role: str
    content: str | None
    refusal: str | None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(msgspec.Struct, omit_defaults=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatResponse(msgspec.Struct, omit_defaults=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    system_fingerprint: str
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChunkChoice(msgspec.Struct, omit_defaults=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(msgspec.Struct, omit_defaults=True):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: dict[str, Any] | None = None
