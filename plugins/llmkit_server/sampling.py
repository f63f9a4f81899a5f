"""From the fields of a body to SamplingParams and RequestOptions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from llmkit import OutputKind, RequestOptions, SamplingParams
from llmkit.errors import InvalidRequestError
from llmkit.requests.response_format import FIELDS, constraint_of
from llmkit_server.errors import bad_request
from llmkit_server.middleware.request_log import REQUEST_ID_HEADER, usable_request_id
from llmkit_server.protocol.base import EngineFields, GenerationBody, StreamFields

if TYPE_CHECKING:
    from llmkit import AsyncLLM

_COPIED = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "bad_words",
    "logit_bias",
    "allowed_token_ids",
    "prompt_logprobs",
)


def sampling_params(llm: AsyncLLM, body: GenerationBody, **fixed: Any) -> SamplingParams:
    """What `body` asks for, the model's own defaults where it does not say; `fixed` wins over both.

    Raises InvalidRequestError, whose param is a field of SamplingParams (see `named_for`).
    """
    values = {name: value for name in _COPIED if (value := getattr(body, name)) is not None}
    values["output_kind"] = OutputKind.DELTA if body.streams else OutputKind.FINAL_ONLY
    constraint = constraint_of({name: getattr(body, name) for name in FIELDS})
    if constraint is not None:
        values["structured_outputs"] = constraint
    return llm.get_default_sampling_params(**{**values, **fixed})


def request_options(
    request: Request, body: EngineFields, request_id: str, *, add_special_tokens: bool
) -> RequestOptions:
    """Options of the engine's request. add_special_tokens: unless the body says. Without `user`, the client's key or
    address stands for the user, so that shares are fair whoever names himself."""
    given = getattr(body, "add_special_tokens", None)
    return RequestOptions(
        request_id=request_id,
        priority=0 if body.priority is None else body.priority,
        user=body.user or request.scope["state"].get("client"),
        cache_salt=body.cache_salt,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        add_special_tokens=add_special_tokens if given is None else given,
        kv_transfer_params=body.kv_transfer_params,
    )


def request_id_of(request: Request, body: EngineFields) -> str:
    """The id of a request: the header X-Request-Id, else the body's, else a new one. Raises ApiError for one that
    could not stand in a log."""
    header = request.headers.get(REQUEST_ID_HEADER)
    given = body.request_id if header is None else header
    if given is None:
        return str(request.scope["state"]["request_id"])
    if not isinstance(given, str) or not usable_request_id(given):
        raise bad_request("request_id must be a text of 1 to 256 printable ASCII characters.", "request_id")
    return given


def check_stream_fields(body: GenerationBody) -> None:
    """Raises ApiError for fields that go with a stream only, or not with one."""
    check_stream_options(body)
    if body.streams and body.prompt_logprobs:
        raise bad_request("prompt_logprobs does not go with stream: true.", "prompt_logprobs")


def check_stream_options(body: StreamFields) -> None:
    """Raises ApiError for stream_options without a stream."""
    if body.stream_options is not None and not body.streams:
        raise bad_request("stream_options goes with stream: true only.", "stream_options")


def constraint_field(body: GenerationBody) -> str:
    """The field by which the body constrains the text; structured_outputs if none does."""
    return next((name for name in FIELDS if getattr(body, name) is not None), "structured_outputs")


@contextmanager
def named_for(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about a field of the engine's name the field that the client has sent."""
    try:
        yield
    except InvalidRequestError as error:
        name = names.get(error.param or "")
        if name is None or name == error.param:
            raise
        message = error.message
        if error.param and message.startswith(error.param):
            message = name + message[len(error.param) :]
        raise InvalidRequestError(message, param=name, hint=error.hint) from error
