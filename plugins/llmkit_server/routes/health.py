"""/health, /ping, /version, /load; HEAD, with which load balancers probe, is answered as GET without the body."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

import llmkit
from llmkit_server.context import ServerContext, context_of
from llmkit_server.errors import RETRY_SOON, ApiError
from llmkit_server.openapi import describe
from llmkit_server.protocol.models import Load, Version
from llmkit_server.streaming import json_response

router = APIRouter(tags=["health"])


@router.head("/health", include_in_schema=False)
@router.get("/health", openapi_extra=describe())
async def health(request: Request) -> Response:
    """Empty 200 if the engine works; 503 saying why if it has ended, is being started again, or is stuck: work is
    pending, but no step has finished for long."""
    check_health(context_of(request))
    return Response()


@router.head("/ping", include_in_schema=False)
@router.get("/ping", openapi_extra=describe())
async def ping(request: Request) -> Response:
    """As /health."""
    return await health(request)


@router.post("/ping", openapi_extra=describe())
async def ping_post(request: Request) -> Response:
    """As /health."""
    return await health(request)


@router.head("/version", include_in_schema=False)
@router.get("/version", openapi_extra=describe(response=Version))
async def version() -> Response:
    """The version of llmkit."""
    return json_response(Version(llmkit.__version__))


@router.head("/load", include_in_schema=False)
@router.get("/load", openapi_extra=describe(response=Load))
async def load(request: Request) -> Response:
    """How many requests are under way."""
    return json_response(Load(context_of(request).admission.num_requests))


def check_health(server: ServerContext) -> None:
    """Raises ApiError 503 unless the engine works."""
    server.check_ready()
    stuck = server.llm.health.stuck_s
    if stuck > server.settings.stuck_after_s:
        raise ApiError(503, f"The engine is stuck: no step has finished for {stuck:.0f} s.", headers=RETRY_SOON)
