"""Server-sent events, and answers whose client may go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmkit_server.errors import as_api_error

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    """One event whose data is `value` as JSON."""
    return b"data: " + _encode(value) + b"\n\n"


def named_event(name: str, /, **fields: Any) -> bytes:
    """One event: its name, and data that begins with the same as type."""
    return f"event: {name}\ndata: ".encode() + _encode({"type": name, **fields}) + b"\n\n"


def json_response(value: Any, headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    return Response(_encode(value), status, dict(headers or {}), "application/json")


async def until_done(events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """`events`, then [DONE]; an error of theirs is an event of its own before that."""
    try:
        async for data in events:
            yield data
    except Exception as error:
        yield event(as_api_error(error).body())
    yield DONE


class Watch:
    """While it is entered, calls `gone` as soon as the client has gone away. The request's body must have been read."""

    def __init__(self, receive: Receive, gone: Callable[[], None]) -> None:
        self._receive = receive
        self._gone = gone
        self._task: asyncio.Task[None] | None = None
        self.client_is_gone = False

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.client_is_gone = True
        self._gone()

    def __enter__(self) -> Watch:
        self._task = asyncio.get_running_loop().create_task(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()


class EventStream(Response):
    """Sends events as they come, each in one piece. `finish` is called at the end, whatever that was; `gone` when the
    client has gone away before."""

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        *,
        gone: Callable[[], None],
        finish: Callable[[], None],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = "text/event-stream"
        self._events = events
        self._gone = gone
        self._finish = finish
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        try:
            with Watch(receive, self._gone) as watch:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for data in self._events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    if watch.client_is_gone:
                        return
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._gone()
            self._finish()
            await self._events.aclose()
