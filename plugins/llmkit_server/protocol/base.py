"""What the bodies of all requests have in common."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

import llmkit
from llmkit.requests import sampling_params as sampling
from llmkit_server.limits import MAX_DOCUMENTS, MAX_MESSAGES, MAX_TEMPLATE_CHARS, MAX_TOOLS, MAX_USER_CHARS

FINGERPRINT = f"llmkit-{llmkit.__version__}"
"""`system_fingerprint` of every answer."""


class RequestBody(BaseModel):
    """Fields that are not declared are kept in `model_extra`, so that they can be named. Null means not given."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str | None = None


class StreamOptions(BaseModel):
    """`stream_options`: usage in a chunk of its own before the end, or besides in every chunk."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def nullable(*schemas: dict[str, Any], **schema: Any) -> Any:
    """A field that may be left out and that others check: the engine, or the route. The schemas are documentation."""
    return Field(default=None, json_schema_extra={"anyOf": [*schemas, *([schema] if schema else []), {"type": "null"}]})


def integer(low: int, high: int) -> Any:
    return nullable(type="integer", minimum=low, maximum=high)


def number(low: float, high: float, **more: Any) -> Any:
    return nullable(type="number", minimum=low, maximum=high, **more)


_MESSAGE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "minLength": 1},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
    },
    "required": ["role"],
}
_TOOL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "parameters": {"type": "object"}},
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
MESSAGES: dict[str, Any] = {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": MAX_MESSAGES}
TOOLS: dict[str, Any] = {"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS}

_IDS = {"type": "integer", "minimum": 0}
_STRINGS = {"type": "string", "minLength": 1}


class EngineFields(RequestBody):
    """What any request to the engine may carry besides its prompt. Checked by the engine."""

    truncate_prompt_tokens: Any = integer(-1, 2**31 - 1)
    priority: Any = integer(-(2**31), 2**31 - 1)
    request_id: Any = nullable(type="string", minLength=1, maxLength=256)
    cache_salt: Any = nullable(type="string", minLength=1)
    kv_transfer_params: Any = nullable(type="object")
    user: str | None = Field(default=None, max_length=MAX_USER_CHARS)


class StreamFields(RequestBody):
    """Whether the answer comes in pieces, and whether they say how many tokens there were."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class GenerationBody(EngineFields, StreamFields):
    """Everything that completions and chats share. Ranges are checked by SamplingParams."""

    n: Any = integer(1, sampling.MAX_N)
    temperature: Any = number(0, 2)
    top_p: Any = number(0, 1, exclusiveMinimum=0)
    top_k: Any = integer(-1, sampling.MAX_TOP_K)
    min_p: Any = number(0, 1)
    presence_penalty: Any = number(-2, 2)
    frequency_penalty: Any = number(-2, 2)
    repetition_penalty: Any = number(0, 1e6, exclusiveMinimum=0)
    seed: Any = integer(-(2**63), 2**63 - 1)
    stop: Any = nullable(_STRINGS, {"type": "array", "items": _STRINGS, "maxItems": sampling.MAX_STOP_STRINGS})
    stop_token_ids: Any = nullable(type="array", items=_IDS, maxItems=sampling.MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: Any = integer(0, sampling.MAX_TOKENS)
    min_tokens: Any = integer(0, sampling.MAX_TOKENS)
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    bad_words: Any = nullable(type="array", items=_STRINGS, maxItems=sampling.MAX_BAD_WORDS)
    logit_bias: Any = nullable(type="object", additionalProperties={"type": "number", "minimum": -100, "maximum": 100})
    allowed_token_ids: Any = nullable(type="array", items=_IDS, minItems=1)
    prompt_logprobs: Any = integer(-1, sampling.MAX_LOGPROBS)

    structured_outputs: Any = nullable(type="object")
    response_format: Any = nullable(type="object")
    guided_json: Any = nullable(type=["object", "string", "boolean"])
    guided_json_object: Any = nullable(type="boolean")
    guided_regex: Any = nullable(type="string")
    guided_choice: Any = nullable(type="array", items=_STRINGS)
    guided_grammar: Any = nullable(type="string")
    guided_whitespace_pattern: Any = nullable(type="string")

    add_special_tokens: bool | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class ChatPromptFields(RequestBody):
    """What makes the prompt of a chat."""

    messages: Any = Field(json_schema_extra=MESSAGES)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Any = nullable(type="array", items={"type": "object"}, maxItems=MAX_DOCUMENTS)
    chat_template: Any = nullable(type="string", maxLength=MAX_TEMPLATE_CHARS)
    chat_template_kwargs: Any = nullable(type="object")
    reasoning_effort: Any = nullable(type="string")
    tools: Any = nullable(TOOLS)


class PromptTokensDetails(msgspec.Struct):
    """cached_tokens: prompt tokens that the prefix cache held, or a connector has loaded."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens of all prompts and answers of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    details = PromptTokensDetails(cached_tokens)
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)


class PromptLogprob(msgspec.Struct):
    """One token at a position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
