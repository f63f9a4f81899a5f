"""Token ids in, token ids out: for routers that tokenise themselves, and between prefill and decode servers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from llmkit import CompletionOutput, OutputKind, RequestOutput, SamplingParams
from llmkit_server.body import unknown_fields_headers
from llmkit_server.context import ServerContext
from llmkit_server.errors import bad_request
from llmkit_server.generation import Generation
from llmkit_server.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from llmkit_server.protocol.base import Usage, usage
from llmkit_server.protocol.chat import ChatLogprobs
from llmkit_server.protocol.inference import GenerateChoice, GenerateRequest, GenerateResponse
from llmkit_server.sampling import check_stream_options, named_for, request_id_of, request_options
from llmkit_server.streaming import event, json_response

_OURS = frozenset({"detokenize", "output_kind"})
"""Fields of SamplingParams that the server sets: clients may send them, and it makes no difference."""

_FIELDS = frozenset(SamplingParams.__struct_fields__) - _OURS

_NAMES = {"prompt": "token_ids", **{name: f"sampling_params.{name}" for name in _FIELDS}}


async def answer_generate(server: ServerContext, request: Request, body: GenerateRequest) -> Response:
    """Runs a request. Raises what `Generation.start` does."""
    model = server.models.resolve(body.model)
    check_stream_options(body)
    ids = body.token_ids
    if not isinstance(ids, list) or not all(type(token_id) is int for token_id in ids):
        raise bad_request("token_ids must be a list of token ids.", "token_ids")
    request_id = request_id_of(request, body)
    with named_for(_NAMES):
        params = _params(body)
    if body.streams and params.prompt_logprobs:
        raise bad_request("prompt_logprobs does not go with stream: true.", "sampling_params.prompt_logprobs")
    options = request_options(request, body, f"generate-{request_id}", add_special_tokens=False)
    generation = Generation(server, request, request_id, model, _NAMES)
    unknown = [f"sampling_params.{name}" for name in body.sampling_params if name not in _FIELDS | _OURS]
    generation.headers = unknown_fields_headers(body, request_id, unknown) | {"x-request-id": request_id}
    await generation.start([{"prompt_token_ids": ids}], params, options)
    writer = GenerateWriter(server, generation, body, params)
    if body.streams:
        return generation.stream(writer.events())
    (output,) = await generation.whole()
    return json_response(writer.response(output), generation.headers)


def _params(body: GenerateRequest) -> SamplingParams:
    """Text is made only where a stop string has to be found in it. Raises ApiError, InvalidRequestError."""
    given = body.sampling_params
    if not isinstance(given, dict):
        raise bad_request("sampling_params must be an object.", "sampling_params")
    fields: dict[str, Any] = {name: value for name, value in given.items() if name in _FIELDS and value is not None}
    fields.setdefault("max_tokens", None)
    kind = OutputKind.DELTA if body.streams else OutputKind.FINAL_ONLY
    return SamplingParams(**fields, output_kind=kind, detokenize=bool(fields.get("stop")))


class GenerateWriter:
    """Writes the outputs of one request."""

    def __init__(
        self, server: ServerContext, generation: Generation, body: GenerateRequest, params: SamplingParams
    ) -> None:
        self._generation = generation
        self._body = body
        self._params = params
        self._names = TokenNames(server.llm.tokenizer, as_ids=True)

    def response(self, output: RequestOutput) -> GenerateResponse:
        """The whole answer."""
        num_tokens = sum(len(answer.token_ids) for answer in output.outputs)
        used = usage(self._generation.num_prompt_tokens, num_tokens, output.num_cached_tokens)
        result = self._body_of([self._choice(answer) for answer in output.outputs], used)
        if self._params.prompt_logprobs is not None:
            result.prompt_logprobs = prompt_logprobs(output.prompt_logprobs, self._params.prompt_logprobs)
        result.kv_transfer_params = output.kv_transfer_params
        return result

    async def events(self) -> AsyncGenerator[bytes]:
        """The chunks of a stream."""
        num_tokens = cached = 0
        body = self._body
        async for _, output in self._generation.outputs():
            cached = output.num_cached_tokens
            num_tokens += sum(len(answer.token_ids) for answer in output.outputs)
            chunk = self._body_of(
                [self._choice(answer) for answer in output.outputs], None if body.includes_usage else msgspec.UNSET
            )
            if body.continuous_usage:
                chunk.usage = usage(self._generation.num_prompt_tokens, num_tokens, cached)
            chunk.kv_transfer_params = output.kv_transfer_params
            yield event(chunk)
        if body.includes_usage:
            yield event(self._body_of([], usage(self._generation.num_prompt_tokens, num_tokens, cached)))

    def _body_of(self, choices: list[GenerateChoice], used: Usage | msgspec.UnsetType | None) -> GenerateResponse:
        generation = self._generation
        return GenerateResponse(generation.id, generation.created, generation.model, choices, used)

    def _choice(self, answer: CompletionOutput) -> GenerateChoice:
        top = self._params.logprobs
        logprobs = None if top is None else ChatLogprobs(chat_logprobs(answer.logprobs or (), top, self._names))
        return GenerateChoice(answer.index, list(answer.token_ids), logprobs, answer.finish_reason, answer.stop_reason)
