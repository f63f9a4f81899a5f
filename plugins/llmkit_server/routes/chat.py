"""/v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from llmkit_server.body import read_body
from llmkit_server.chat import answer_chat
from llmkit_server.context import context_of
from llmkit_server.openapi import describe
from llmkit_server.protocol.chat import ChatRequest, ChatResponse

router = APIRouter(prefix="/v1", tags=["generation"])


@router.post("/chat/completions", openapi_extra=describe(ChatRequest, ChatResponse, streams=True))
async def chat_completions(request: Request) -> Response:
    """The model's answer to a conversation."""
    return await answer_chat(context_of(request), request, await read_body(request, ChatRequest))
