"""A bound on the size of bodies, also of those that do not say how long they are."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmkit_server.errors import ApiError


class BodyLimit:
    """Refuses with 413: at once by Content-Length, else when the bytes that arrive are too many."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._max_bytes:
            await self._too_large().response()(scope, receive, send)
            return
        received = 0

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise self._too_large()
            return message

        await self._app(scope, receive_counted, send)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than the {self._max_bytes} bytes that this server takes.")
