"""/inference/v1/generate."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from llmkit_server.body import read_body
from llmkit_server.context import context_of
from llmkit_server.inference import answer_generate
from llmkit_server.openapi import describe
from llmkit_server.protocol.inference import GenerateRequest, GenerateResponse

router = APIRouter(prefix="/inference/v1", tags=["generation"])


@router.post("/generate", openapi_extra=describe(GenerateRequest, GenerateResponse, streams=True))
async def generate(request: Request) -> Response:
    """How the model goes on with token ids, as token ids."""
    return await answer_generate(context_of(request), request, await read_body(request, GenerateRequest))
