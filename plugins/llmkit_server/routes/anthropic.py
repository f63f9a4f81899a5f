"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from llmkit_server.anthropic_request import NAMES, chat_of
from llmkit_server.anthropic_writer import MessageWriter
from llmkit_server.body import read_body
from llmkit_server.chat import start_chat
from llmkit_server.chat_prompt import chat_prompt
from llmkit_server.context import context_of
from llmkit_server.openapi import describe
from llmkit_server.protocol.anthropic import Message, MessageError, MessagesPrompt, MessagesRequest, TokenCount
from llmkit_server.streaming import json_response
from llmkit_server.tool_use import tool_use

router = APIRouter(prefix="/v1/messages", tags=["generation"])


@router.post("", openapi_extra=describe(MessagesRequest, Message, streams=True, error=MessageError))
async def messages(request: Request) -> Response:
    """The model's answer to a conversation, with the API of Anthropic."""
    server = context_of(request)
    body = chat_of(await read_body(request, MessagesRequest))
    started = await start_chat(server, request, body, "msg_", NAMES)
    writer = MessageWriter(server, started, shows_reasoning=body.include_reasoning is not False)
    generation = started.generation
    if body.streams:
        return generation.stream_of(writer.events())
    (output,) = await generation.whole()
    return json_response(writer.message(output), generation.headers)


@router.post("/count_tokens", openapi_extra=describe(MessagesPrompt, TokenCount, error=MessageError))
async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of a message has."""
    server = context_of(request)
    body = chat_of(await read_body(request, MessagesPrompt))
    server.models.resolve(body.model)
    prompt = await chat_prompt(server, body, tool_use(server, body).tools)
    ids = await server.text_threads.run(server.tokenizer.encode, prompt, add_special_tokens=False)
    return json_response(TokenCount(len(ids)))
