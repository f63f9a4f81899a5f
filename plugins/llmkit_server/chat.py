"""Chats: from the body to a prompt and parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmkit import SamplingParams
from llmkit.requests.response_format import FIELDS, constraint_of
from llmkit_server.answer_reader import AnswerReader
from llmkit_server.body import unknown_fields_headers
from llmkit_server.chat_prompt import chat_prompt
from llmkit_server.chat_writer import ChatWriter
from llmkit_server.context import ServerContext
from llmkit_server.errors import ApiError, bad_request
from llmkit_server.generation import Generation, tokenised_if_long
from llmkit_server.protocol.chat import ChatRequest
from llmkit_server.sampling import (
    check_stream_fields,
    constraint_field,
    named_for,
    request_id_of,
    request_options,
    sampling_params,
)
from llmkit_server.streaming import json_response
from llmkit_server.tool_use import ToolUse, tool_use

PROMPT_TAIL_CHARS = 256
"""How much of the prompt's end a reasoning parser sees."""


@dataclass(frozen=True)
class StartedChat:
    """A chat that the engine has taken. prompt_tail: the end of its prompt, which a reasoning parser must see."""

    generation: Generation
    use: ToolUse
    prompt_tail: str
    params: SamplingParams

    def reader(self, server: ServerContext, *, shows_reasoning: bool = True) -> AnswerReader:
        """For one answer."""
        reasoning = server.reasoning_format
        return AnswerReader(
            None if reasoning is None else reasoning.parser(self.prompt_tail),
            self.use.parser(),
            parallel=self.use.parallel,
            shows_reasoning=shows_reasoning,
        )


async def start_chat(
    server: ServerContext,
    request: Request,
    body: ChatRequest,
    prefix: str,
    names: Mapping[str, str],
    *,
    waits: bool = True,
) -> StartedChat:
    """From the body to a running request. prefix: of its id. names: fields of the engine's request → the client's.
    waits, and what is raised: as of `Generation.start`."""
    model = server.models.resolve(body.model)
    request_id = request_id_of(request, body)
    use = tool_use(server, body)
    with named_for(names):
        prompt = await chat_prompt(server, body, use.tools)
        tail = prompt[-PROMPT_TAIL_CHARS:]
        params = _params(server, body, use, tail)
    options = request_options(request, body, f"{prefix}{request_id}", add_special_tokens=False)
    prompts = await tokenised_if_long(server, [prompt], options)
    generation = Generation(server, request, f"{prefix}{request_id}", model, names)
    generation.headers = unknown_fields_headers(body, request_id) | {"x-request-id": request_id}
    await generation.start(prompts, params, options, waits=waits)
    return StartedChat(generation, use, tail, params)


async def answer_chat(server: ServerContext, request: Request, body: ChatRequest) -> Response:
    """Runs a chat request. Raises what `Generation.start` does."""
    _check_fields(body)
    started = await start_chat(server, request, body, "chatcmpl-", _client_names(body))
    generation = started.generation
    writer = ChatWriter(server, generation, body, started.use, started.prompt_tail)
    if body.streams:
        return generation.stream(writer.events())
    (output,) = await generation.whole()
    return json_response(writer.response(output), generation.headers)


def _check_fields(body: ChatRequest) -> None:
    check_stream_fields(body)
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true.", "top_logprobs")
    if body.modalities is not None and body.modalities != ["text"]:
        raise ApiError(501, "modalities may only be text.", param="modalities")


def _client_names(body: ChatRequest) -> dict[str, str]:
    """Fields of the engine's request → those of a chat that they come from."""
    return {
        "prompt": "messages",
        "structured_outputs": constraint_field(body),
        "logprobs": "top_logprobs",
        "max_tokens": "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
    }


def _params(server: ServerContext, body: ChatRequest, use: ToolUse, prompt_tail: str) -> SamplingParams:
    """Without a limit, the answer may fill the context."""
    given = body.max_completion_tokens
    fixed: dict[str, Any] = {"max_tokens": body.max_tokens if given is None else given}
    if body.logprobs:
        fixed["logprobs"] = 0 if body.top_logprobs is None else body.top_logprobs
    constraint = use.constraint(constraint_of({name: getattr(body, name) for name in FIELDS}))
    reasoning = server.reasoning_format
    if constraint is not None and reasoning is not None:
        constraint = reasoning.constraint(constraint, prompt_tail)
    fixed["structured_outputs"] = constraint
    formats = [each for each in (use.format, reasoning) if each is not None]
    if any(each.needs_special_tokens for each in formats):
        fixed["skip_special_tokens"] = False
    return sampling_params(server.llm, body, **fixed)
