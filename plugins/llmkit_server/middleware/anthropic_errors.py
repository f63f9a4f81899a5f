"""Errors of Anthropic's endpoints in Anthropic's shape, wherever they come from: routes, keys, limits, the router."""

from __future__ import annotations

import msgspec
from starlette._utils import get_route_path
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmkit_server.errors import ErrorBody
from llmkit_server.protocol.anthropic import error_body

ROOT = "/v1/messages"


class AnthropicErrors:
    """Rewrites the bodies of errors. Success passes untouched, as do bodies that are no error of ours."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_theirs(get_route_path(scope)):
            await self._app(scope, receive, send)
            return
        request_id = scope["state"]["request_id"]
        start: Message | None = None
        pieces: list[bytes] = []

        async def rewrite(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("request-id", request_id)
                if message["status"] >= 400:
                    start = message
                    return
            if start is None:
                await send(message)
                return
            pieces.append(message.get("body", b""))
            if message.get("more_body", False):
                return
            body = _rewritten(b"".join(pieces), start["status"], request_id)
            MutableHeaders(scope=start)["content-length"] = str(len(body))
            await send(start)
            await send({"type": "http.response.body", "body": body, "more_body": False})

        await self._app(scope, receive, rewrite)


def _is_theirs(path: str) -> bool:
    return path == ROOT or path.startswith(f"{ROOT}/")


def _rewritten(body: bytes, status: int, request_id: str) -> bytes:
    try:
        detail = msgspec.json.decode(body, type=ErrorBody).error
    except msgspec.MsgspecError:
        return body
    return msgspec.json.encode(error_body(status, detail.message, detail.param, request_id))
