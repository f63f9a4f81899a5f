"""The outermost layer: a request id, a line in the log, and the last net for exceptions."""

from __future__ import annotations

import logging
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmkit_server.errors import as_api_error

logger = logging.getLogger("llmkit.server.access")

REQUEST_ID_HEADER = "x-request-id"
MAX_REQUEST_ID_CHARS = 256

CLOSED = "the handler is closed"
"""In the words of uvloop for writing to a connection that is closed."""


def usable_request_id(text: str) -> bool:
    """Whether a client's id can stand in a header and a log: printable ASCII, 1 to 256 characters."""
    return 0 < len(text) <= MAX_REQUEST_ID_CHARS and text.isascii() and text.isprintable()


class RequestLog:
    """Sets `scope["state"]["request_id"]`, from the client's X-Request-Id if that is usable, and answers with it."""

    def __init__(self, app: ASGIApp, access_log: bool) -> None:
        self._app = app
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = given if usable_request_id(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        began = time.monotonic()
        status, is_gone = 0, False

        async def send_marked(message: Message) -> None:
            nonlocal status, is_gone
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).setdefault(REQUEST_ID_HEADER, request_id)
            try:
                await send(message)
            except RuntimeError as error:
                is_gone = CLOSED in str(error)
                raise

        try:
            await self._app(scope, receive, send_marked)
        except Exception as error:
            if is_gone:  # a client that hung up behind a request it had sent ahead: nobody was told of that
                return
            problem = as_api_error(error)
            if status == 0:
                await problem.response()(scope, receive, send_marked)
            else:
                raise
        finally:
            if self._access_log:
                self._log(scope, request_id, status, time.monotonic() - began)

    def _log(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        client = scope["client"][0] if scope.get("client") else "-"
        path = scope["path"].encode("unicode_escape").decode()[:256]
        logger.info(
            "%s %s %s %s %.3f s %s", client, scope["method"], path, status or "-", seconds, request_id,
            extra={
                "client": client, "method": scope["method"], "path": path, "status": status,
                "seconds": round(seconds, 6), "request_id": request_id,
            },
        )  # fmt: skip
