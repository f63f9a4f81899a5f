"""The server's routes without sockets, for whoever has requests at hand in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from starlette.types import Message, Scope

from llmkit_server.app import create_app

if TYPE_CHECKING:
    from llmkit import AsyncLLM
    from llmkit.registry import Registry

_LOCAL_SETTINGS = {
    "api_keys": (),
    "rate_limit": None,
    "middleware": (),
    "allowed_origins": (),
    "root_path": "",
    "access_log": False,
    "enable_control_endpoints": False,
    "max_queue": 1_000_000,
}
"""Nothing that keeps strangers out; the caller bounds what it sends at a time."""


class InProcessServer:
    """Answers requests as the HTTP server does, with the settings in the engine's configuration. `llm` stays its
    caller's to close."""

    def __init__(self, llm: AsyncLLM, registry: Registry | None = None) -> None:
        settings = llm.config.server.model_copy(update=_LOCAL_SETTINGS)
        self._app = create_app(llm, settings, registry)

    @property
    def paths(self) -> frozenset[str]:
        """What takes a POST."""
        operations = self._app.openapi()["paths"]
        return frozenset(path for path, methods in operations.items() if "post" in methods)

    async def post(self, path: str, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body of the response to a JSON body."""
        pending = [body]
        status, headers, pieces = 500, {}, []

        async def receive() -> Message:
            if pending:
                return {"type": "http.request", "body": pending.pop(), "more_body": False}
            await asyncio.Event().wait()  # nobody goes away before the answer is there
            raise AssertionError("unreachable")

        async def send(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
            else:
                pieces.append(message.get("body", b""))

        await self._app(_scope(path, len(body)), receive, send)
        return status, headers, b"".join(pieces)


def _scope(path: str, length: int) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(length).encode())],
        "client": None,
        "server": None,
    }
