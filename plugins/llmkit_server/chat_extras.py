"""Fields of chats that the other forms of conversations take besides their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmkit_server.errors import bad_request
from llmkit_server.protocol.chat import ChatRequest

EXTRAS = frozenset(
    {
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "stop_token_ids",
        "min_tokens",
        "ignore_eos",
        "logit_bias",
        "bad_words",
        "allowed_token_ids",
        "skip_special_tokens",
        "structured_outputs",
        "truncate_prompt_tokens",
        "priority",
        "request_id",
        "cache_salt",
        "kv_transfer_params",
        "chat_template",
        "chat_template_kwargs",
        "documents",
    }
)


def chat_extras(given: Mapping[str, Any], of: str, more: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Fields that the API in question does not have: those in EXTRAS and `more` are taken, unknown ones are named
    later. Raises ApiError for other fields of chats, which would mean something else there."""
    for name in given:
        if name in ChatRequest.model_fields and name not in EXTRAS and name not in more:
            raise bad_request(f"{name[:64]} is no field of {of}.", name)
    return dict(given)
