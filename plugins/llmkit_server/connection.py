"""A client's connection: uvicorn's HTTP, with an end for clients that keep a connection without using it."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from llmkit_server.errors import ApiError
from llmkit_server.limits import HEAD_TIMEOUT_S, MAX_HEAD_BYTES, MAX_URL_BYTES, READER_TIMEOUT_S

LINGER_S = 2.0
"""How long what a client still sends is read after it has been refused."""

_RESERVED_FILES = 256
"""File descriptors that connections leave to everything else, such as another start of the engine."""

_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    414: b"URI Too Long",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


_MORE_MAY_COME = (400, 414, 431)
"""Refusals of clients that may still be sending."""

_HEADER_FRAME_BYTES = 4
"""Of a header besides name and value: colon, blank, end of line."""


class Connection(HttpToolsProtocol):
    """Ends a connection whose request line and headers do not come within HEAD_TIMEOUT_S or are longer than
    MAX_HEAD_BYTES, and one whose client reads nothing for READER_TIMEOUT_S while an answer waits; its request is
    aborted as if the client had gone. Connections beyond `max_connections` get a 503 at once. One that is idle after an
    answer is closed without a word, by uvicorn: a client might take a word for the next answer.

    What a refused client still sends is read and dropped for LINGER_S at most: closed at once, the connection would be
    reset before the client has read why.
    """

    max_connections = 1_000_000

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._head_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._num_head_bytes = 0
        self._head_size = 0
        self._in_body = False
        self._head_begun = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(ApiError(503, "The server has as many connections as it takes.", headers={"retry-after": "1"}))
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        self.resume_writing()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._linger_timer is not None:
            return
        super().data_received(data)
        if self._head_timer is None and not self._in_body and self.cycle is not None and self.cycle.response_complete:
            self._await_head()
        if self._head_timer is not None and not self._in_body:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(_head_too_large())

    def on_message_begin(self) -> None:
        self._head_begun = True
        self._head_size = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._head_size += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_size += len(name) + len(value) + _HEADER_FRAME_BYTES
        if self._head_size > MAX_HEAD_BYTES:
            raise ValueError("the head is too large")  # ends the parser, which leads to send_400_response
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_arrived()
        self._head_begun = False
        self._in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._head_begun and self.cycle.response_complete and not self.transport.is_closing():
            self._await_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader_timer = self._reader_timer or self.loop.call_later(READER_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def send_400_response(self, msg: str) -> None:
        del msg  # says less
        if len(self.url) > MAX_URL_BYTES:
            self._refuse(ApiError(414, f"Path and query are longer than {MAX_URL_BYTES} bytes."))
        elif self._head_size > MAX_HEAD_BYTES:
            self._refuse(_head_too_large())
        else:
            self._refuse(ApiError(400, "The request is not valid HTTP."))

    def _await_head(self) -> None:
        self._head_arrived()
        self._num_head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_arrived(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        self._refuse(ApiError(408, f"No request has arrived within {HEAD_TIMEOUT_S:g} s."))

    def _refuse(self, error: ApiError) -> None:
        """Answer with `error` and hang up; where another answer has begun, hang up only."""
        self._head_arrived()
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not (cycle.response_started or self.pipeline):
            body = msgspec.json.encode(error.body())
            head = [b"HTTP/1.1 %d %s" % (error.status, _REASONS[error.status]), b"content-type: application/json"]
            head += [f"{name}: {value}".encode() for name, value in error.headers.items()]
            head += [b"content-length: %d" % len(body), b"connection: close", b"", b""]
            self.transport.write(b"\r\n".join(head) + body)
            if error.status in _MORE_MAY_COME and (cycle is None or cycle.response_complete):
                self._linger()
                return
        self.transport.close()

    def _linger(self) -> None:
        """Close once the client has closed, or after LINGER_S."""
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._linger_timer = self.loop.call_later(LINGER_S, self.transport.close)


def _head_too_large() -> ApiError:
    return ApiError(431, f"The headers are larger than {MAX_HEAD_BYTES} bytes.")


def connection_type() -> type[Connection]:
    """Connections for a server that takes as many as the process may open files for; the process asks for all that
    it can have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = Connection.max_connections if hard == resource.RLIM_INFINITY else hard - _RESERVED_FILES
    return type("LimitedConnection", (Connection,), {"max_connections": max(1, limit)})
