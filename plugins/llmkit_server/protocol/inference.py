"""/inference/v1/generate: token ids in, token ids out."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import Field

from llmkit_server.protocol.base import EngineFields, PromptLogprobs, StreamFields, Usage
from llmkit_server.protocol.chat import ChatLogprobs


class GenerateRequest(EngineFields, StreamFields):
    """sampling_params: fields of SamplingParams. Without max_tokens the answer may fill the context."""

    token_ids: Any = Field(
        json_schema_extra={"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
    )
    sampling_params: Any = Field(json_schema_extra={"type": "object"})


class GenerateChoice(msgspec.Struct):
    """One answer, or the news of one. logprobs: as in chats, tokens written as `token_id:7`."""

    index: int
    token_ids: list[int]
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class GenerateResponse(msgspec.Struct, omit_defaults=True):
    """The answers. In a stream, choices are news, and usage is there only if it was asked for."""

    request_id: str
    created: int
    model: str
    choices: list[GenerateChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | None = None
    kv_transfer_params: dict[str, Any] | None = None
