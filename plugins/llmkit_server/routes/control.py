"""What operators do to a running engine; served only with server.enable_control_endpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

import llmkit
from llmkit.errors import EngineClosedError, EngineDeadError, EngineError
from llmkit_server.context import ServerContext, context_of
from llmkit_server.errors import ApiError, bad_request
from llmkit_server.openapi import describe
from llmkit_server.streaming import json_response

router = APIRouter(tags=["control"])


class Sleeping(msgspec.Struct):
    is_sleeping: bool


class Profile(msgspec.Struct):
    """path: of the trace, on the server's machine."""

    path: str


class ServerInfo(msgspec.Struct):
    version: str
    config: dict[str, Any]
    stats: Any


@router.post("/sleep", openapi_extra=describe())
async def sleep(request: Request) -> Response:
    """Take no steps; requests wait. ?level=0: only that; 1: free the cache, on a GPU the weights too; 2: free both."""
    level = request.query_params.get("level", "1")
    if level not in ("0", "1", "2"):
        raise bad_request("level must be 0, 1 or 2.", "level")
    with _conflicts():
        await context_of(request).llm.sleep(int(level))
    return Response()


@router.post("/wake_up", openapi_extra=describe())
async def wake_up(request: Request) -> Response:
    """Take steps again. ?tags=weights, ?tags=kv_cache: bring back only that, and go on sleeping until all is there."""
    tags = request.query_params.getlist("tags")
    with _conflicts():
        await context_of(request).llm.wake_up(tags or None)
    return Response()


@router.get("/is_sleeping", openapi_extra=describe(response=Sleeping))
async def is_sleeping(request: Request) -> Response:
    """Whether the engine sleeps or is paused."""
    return json_response(Sleeping(await context_of(request).llm.is_sleeping()))


@router.post("/pause", openapi_extra=describe())
async def pause(request: Request) -> Response:
    """Stop taking steps; requests wait. As /sleep?level=0."""
    await context_of(request).llm.sleep(0)
    return Response()


@router.post("/resume", openapi_extra=describe())
async def resume(request: Request) -> Response:
    """Take steps again after /pause."""
    with _conflicts():
        await context_of(request).llm.wake_up(None)
    return Response()


@router.post("/reset_prefix_cache", openapi_extra=describe())
async def reset_prefix_cache(request: Request) -> Response:
    """Forget all cached prefixes; 409 while requests run that hold some of them."""
    if not await context_of(request).llm.reset_prefix_cache():
        raise ApiError(409, "The prefix cache is in use by running requests; nothing was forgotten.")
    return Response()


@router.post("/start_profile", openapi_extra=describe())
async def start_profile(request: Request) -> Response:
    """Begin a trace of the engine with torch's profiler; 409 if one goes on."""
    with _conflicts():
        await context_of(request).llm.start_profile()
    return Response()


@router.post("/stop_profile", openapi_extra=describe(response=Profile))
async def stop_profile(request: Request) -> Response:
    """End the trace; where its file is. 409 if there is none."""
    with _conflicts():
        path: Path = await context_of(request).llm.stop_profile()
    return json_response(Profile(str(path)))


@router.get("/server_info", openapi_extra=describe(response=ServerInfo))
async def server_info(request: Request) -> Response:
    """Version, settings without secrets, and the engine's numbers."""
    server = context_of(request)
    return json_response(ServerInfo(llmkit.__version__, shown_config(server), await server.llm.stats()))


@contextmanager
def _conflicts() -> Iterator[None]:
    """What the engine cannot do in its present state is a 409."""
    try:
        yield
    except (EngineClosedError, EngineDeadError):
        raise
    except EngineError as error:
        raise ApiError(409, str(error)) from error


def shown_config(server: ServerContext) -> dict[str, Any]:
    """The settings, with stars for keys."""
    config: dict[str, Any] = server.llm.config.model_dump(mode="json")
    config["server"] = server.settings.model_dump(mode="json") | {"api_keys": ["***"] * len(server.settings.api_keys)}
    return config
