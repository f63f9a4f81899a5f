"""Completions: from the body to prompts and parameters, and from outputs to the response or its chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from llmkit import CompletionOutput, RequestOutput, SamplingParams
from llmkit_server.body import unknown_fields_headers
from llmkit_server.context import ServerContext
from llmkit_server.errors import bad_request, unsupported
from llmkit_server.generation import Generation, tokenised_if_long
from llmkit_server.limits import MAX_PROMPTS
from llmkit_server.logprobs import CompletionLogprobWriter, TokenNames, prompt_logprobs
from llmkit_server.protocol.base import FINGERPRINT, Usage, usage
from llmkit_server.protocol.completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from llmkit_server.sampling import (
    check_stream_fields,
    constraint_field,
    named_for,
    request_id_of,
    request_options,
    sampling_params,
)
from llmkit_server.streaming import event, json_response

DEFAULT_MAX_TOKENS = 16


async def answer_completion(server: ServerContext, request: Request, body: CompletionRequest) -> Response:
    """Runs a completion request. Raises what `Generation.start` does."""
    model = server.models.resolve(body.model)
    prompts = prompts_of(body.prompt, "prompt")
    _check_fields(body)
    request_id = request_id_of(request, body)
    names = {"structured_outputs": constraint_field(body)}
    with named_for(names):
        params = _params(server, body)
    options = request_options(request, body, f"cmpl-{request_id}", add_special_tokens=True)
    prompts = await tokenised_if_long(server, prompts, options)
    generation = Generation(server, request, f"cmpl-{request_id}", model, names)
    generation.headers = unknown_fields_headers(body, request_id) | {"x-request-id": request_id}
    await generation.start(prompts, params, options)
    writer = CompletionWriter(server, generation, body, params)
    if body.streams:
        return generation.stream(writer.events())
    return json_response(writer.response(await generation.whole()), generation.headers)


def prompts_of(prompt: Any, param: str) -> list[Any]:
    """The prompts in the field `param`, each a text or a list of token ids. Raises ApiError for anything else."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise bad_request(f"{param} must be a text, token ids, or a list of either.", param)
    if not prompt:
        raise bad_request(f"{param} must not be empty.", param)
    if all(type(item) is int for item in prompt):
        return [prompt]
    if not all(isinstance(item, str) for item in prompt) and not all(isinstance(item, list) for item in prompt):
        raise bad_request(f"{param} must be a text, token ids, or a list of either.", param)
    if len(prompt) > MAX_PROMPTS:
        raise bad_request(f"{param} may hold at most {MAX_PROMPTS} prompts, got {len(prompt)}.", param)
    return prompt


def _check_fields(body: CompletionRequest) -> None:
    check_stream_fields(body)
    if body.suffix:
        raise unsupported("suffix is not supported: the model only goes on with a text.", "suffix")
    if body.best_of is not None and body.best_of != (1 if body.n is None else body.n):
        raise unsupported("best_of is not supported; ask for n answers.", "best_of")


def _params(server: ServerContext, body: CompletionRequest) -> SamplingParams:
    """With echo, the prompt is scored as the answer is, or at least computed where there is no answer."""
    fixed: dict[str, Any] = {"logprobs": body.logprobs}
    fixed["max_tokens"] = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if body.echo:
        wanted = [value for value in (body.prompt_logprobs, body.logprobs) if value is not None]
        if wanted and all(type(value) is int for value in wanted):
            fixed["prompt_logprobs"] = -1 if -1 in wanted else max(wanted)
        elif not wanted and body.max_tokens == 0:
            fixed["prompt_logprobs"] = 0
    return sampling_params(server.llm, body, **fixed)


class CompletionWriter:
    """Writes the outputs of one request. Choices are numbered prompt by prompt: answer j of prompt i is i * n + j."""

    def __init__(
        self, server: ServerContext, generation: Generation, body: CompletionRequest, params: SamplingParams
    ) -> None:
        self._server = server
        self._generation = generation
        self._body = body
        self._n = params.n
        tokenizer = server.llm.tokenizer
        self._names = TokenNames(tokenizer, bool(body.return_tokens_as_token_ids))
        self._skipped = (
            frozenset() if tokenizer is None or not params.skip_special_tokens else tokenizer.special_token_ids
        )

    def response(self, outputs: list[RequestOutput]) -> CompletionResponse:
        """The whole answer."""
        choices = [self._choice(i, output, answer) for i, output in enumerate(outputs) for answer in output.outputs]
        completion_tokens = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
        cached = sum(output.num_cached_tokens for output in outputs)
        result = self._body_of(choices, usage(self._generation.num_prompt_tokens, completion_tokens, cached))
        result.kv_transfer_params = next((o.kv_transfer_params for o in outputs if o.kv_transfer_params), None)
        return result

    def _choice(self, number: int, output: RequestOutput, answer: CompletionOutput) -> CompletionChoice:
        writer = self._logprob_writer()
        choice = self._news(number, output, answer, writer, with_prompt=True)
        if self._body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs, self._body.prompt_logprobs)
        return choice

    async def events(self) -> AsyncGenerator[bytes]:
        """The chunks of a stream."""
        writers: dict[int, CompletionLogprobWriter] = {}
        counts: dict[int, int] = {}
        cached: dict[int, int] = {}
        body = self._body
        async for number, output in self._generation.outputs():
            cached[number] = output.num_cached_tokens
            for answer in output.outputs:
                index = number * self._n + answer.index
                is_first = index not in writers
                writer = writers.setdefault(index, self._logprob_writer())
                counts[index] = counts.get(index, 0) + len(answer.token_ids)
                choice = self._news(number, output, answer, writer, with_prompt=is_first)
                chunk = self._body_of([choice], None if body.includes_usage else msgspec.UNSET)
                if body.continuous_usage:
                    chunk.usage = self._usage_so_far(counts, cached)
                if answer.finish_reason is not None:
                    chunk.kv_transfer_params = output.kv_transfer_params
                yield event(chunk)
        if body.includes_usage:
            yield event(self._body_of([], self._usage_so_far(counts, cached)))

    def _usage_so_far(self, counts: dict[int, int], cached: dict[int, int]) -> Usage:
        return usage(self._generation.num_prompt_tokens, sum(counts.values()), sum(cached.values()))

    def _body_of(self, choices: list[CompletionChoice], used: Usage | msgspec.UnsetType | None) -> CompletionResponse:
        generation = self._generation
        return CompletionResponse(
            generation.id, "text_completion", generation.created, generation.model, choices, FINGERPRINT, used
        )

    def _logprob_writer(self) -> CompletionLogprobWriter:
        return CompletionLogprobWriter(self._names, self._body.logprobs or 0)

    def _news(
        self,
        number: int,
        output: RequestOutput,
        answer: CompletionOutput,
        writer: CompletionLogprobWriter,
        *,
        with_prompt: bool,
    ) -> CompletionChoice:
        """with_prompt: this is the beginning of the answer, where an echoed prompt and its ids stand."""
        body = self._body
        echo = bool(body.echo) and with_prompt
        logprobs: CompletionLogprobs | None = None
        if body.logprobs is not None:
            logprobs = CompletionLogprobs([], [], [], [])
            if echo:
                writer.write(logprobs, output.prompt_logprobs or (), output.prompt_token_ids)
            writer.write(logprobs, answer.logprobs or (), answer.token_ids, self._skipped)
        text = self._prompt_text(output) + answer.text if echo else answer.text
        choice = CompletionChoice(
            number * self._n + answer.index, text, logprobs, answer.finish_reason, answer.stop_reason
        )
        if body.return_token_ids:
            choice.token_ids = list(answer.token_ids)
            if with_prompt:
                choice.prompt_token_ids = output.prompt_token_ids
        return choice

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None and self._body.truncate_prompt_tokens is None:
            return output.prompt
        tokenizer = self._server.llm.tokenizer
        return "" if tokenizer is None else tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
