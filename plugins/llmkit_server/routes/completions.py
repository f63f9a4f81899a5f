"""/v1/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from llmkit_server.body import read_body
from llmkit_server.completions import answer_completion
from llmkit_server.context import context_of
from llmkit_server.openapi import describe
from llmkit_server.protocol.completions import CompletionRequest, CompletionResponse

router = APIRouter(prefix="/v1", tags=["generation"])


@router.post("/completions", openapi_extra=describe(CompletionRequest, CompletionResponse, streams=True))
async def completions(request: Request) -> Response:
    """How the model goes on with one or several prompts."""
    return await answer_completion(context_of(request), request, await read_body(request, CompletionRequest))
