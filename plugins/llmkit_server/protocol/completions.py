"""/v1/completions."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from pydantic import Field

from llmkit_server.limits import MAX_PROMPTS
from llmkit_server.protocol.base import GenerationBody, PromptLogprobs, Usage, integer, nullable

_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

PROMPT: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_PROMPTS},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}


class CompletionRequest(GenerationBody):
    """prompt: text, texts, token ids, or lists of ids. logprobs: how many at each position, besides the token's own."""

    prompt: Any = Field(json_schema_extra=PROMPT)
    logprobs: Any = integer(0, 2**31 - 1)
    suffix: Any = nullable(type="string")
    best_of: Any = integer(1, 2**31 - 1)


class CompletionLogprobs(msgspec.Struct):
    """One entry a token. text_offset: characters before the token. Impossible alternatives are left out."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, omit_defaults=True):
    """One answer, or the news of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionResponse(msgspec.Struct, omit_defaults=True):
    """The answers. In a stream, choices are news, and usage is there only if it was asked for."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    kv_transfer_params: dict[str, Any] | None = None
