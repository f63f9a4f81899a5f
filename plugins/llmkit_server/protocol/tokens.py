"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import Field

from llmkit_server.limits import MAX_DETOKENIZE_IDS, MAX_TOKENIZE_CHARS
from llmkit_server.protocol.base import MESSAGES, ChatPromptFields, RequestBody, nullable


class TokenizeRequest(ChatPromptFields):
    """A prompt, or messages that a chat template makes one of. add_special_tokens: default: for a prompt."""

    messages: Any = nullable(MESSAGES)
    prompt: str | None = Field(default=None, max_length=MAX_TOKENIZE_CHARS)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(msgspec.Struct):
    """token_strs: the tokens as they stand in the vocabulary, if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(RequestBody):
    tokens: Any = Field(
        json_schema_extra={
            "type": "array",
            "items": {"type": "integer", "minimum": 0},
            "maxItems": MAX_DETOKENIZE_IDS,
        }
    )


class DetokenizeResponse(msgspec.Struct):
    prompt: str
