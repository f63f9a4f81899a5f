"""One server, and what can go wrong on the way to it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from llmkit.errors import ConfigError, InvalidRequestError
from llmkit_cli.remote.chunks import Chunk, decode_chunk, error_text
from llmkit_cli.remote.errors import RemoteError
from llmkit_cli.remote.events import DONE, EventReader

CONNECT_TIMEOUT_S = 30.0


class RemoteServer:
    """A server with the API of OpenAI. To be entered, in the event loop that uses it.

    url: where its API is, with or without `/v1`. timeout_s: for a whole request; None: any time.
    Raises ConfigError for what is no URL.
    """

    def __init__(self, url: str, api_key: str | None = None, *, timeout_s: float | None = None) -> None:
        self.url = base_of(url)
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "the server is to be entered first"
        return self._session

    async def __aenter__(self) -> RemoteServer:
        connector = aiohttp.TCPConnector(limit=0)  # who asks says how many at a time
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, timeout=self._timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.session.close()

    async def models(self) -> list[str]:
        """The names it serves. Raises RemoteError."""
        body = await self._get("/v1/models")
        try:
            return [str(card["id"]) for card in msgspec.json.decode(body)["data"]]
        except (msgspec.MsgspecError, LookupError, TypeError) as error:
            raise RemoteError(
                f"{self.url}/v1/models is no list of models.", "stream", hint="Is this the URL of an OpenAI-style API?"
            ) from error

    async def served_model(self, wanted: str | None) -> str:
        """`wanted`, or the first model there is. Raises InvalidRequestError if it is not served, RemoteError."""
        try:
            names = await self.models()
        except RemoteError as error:
            if wanted is not None and error.kind in ("404", "405", "501"):
                return wanted  # a server need not have that list
            raise
        if wanted is None and names:
            return names[0]
        if wanted is None or wanted not in names:
            there = f"it serves {', '.join(names)}" if names else "it serves none"
            raise InvalidRequestError(f"The server at {self.url} has no model {wanted or ''!r}: {there}.")
        return wanted

    async def _get(self, path: str) -> bytes:
        try:
            async with self.session.get(self.url + path) as response:
                body = await response.read()
                if response.status != 200:
                    raise self.refusal(response.status, body)
                return body
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self.unreachable(error) from error

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Chunk]:
        """The chunks of a streamed answer. Raises RemoteError, at any moment."""
        try:
            async with self.session.post(self.url + path, json=dict(body)) as response:
                if response.status != 200:
                    raise self.refusal(response.status, await response.read())
                reader = EventReader()
                async for piece in response.content.iter_any():
                    for data in reader.feed(piece):
                        if data == DONE:
                            return
                        yield chunk_of(data)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self.unreachable(error) from error
        raise RemoteError("The answer broke off before its end.", "stream")

    def refusal(self, status: int, body: bytes) -> RemoteError:
        """The error for a response that is no success."""
        hint = {
            401: "Give a key: --api-key, or the environment variable OPENAI_API_KEY.",
            429: "The server is busy, or the rate limit is reached.",
        }.get(status)
        return RemoteError(f"{self.url} answers {status}: {error_text(body)}", str(status), hint=hint)

    def unreachable(self, error: BaseException) -> RemoteError:
        """The error for what happened on the way."""
        if isinstance(error, aiohttp.ClientConnectorError):
            number = error.os_error.errno
            return RemoteError(
                f"No server answers at {self.url}: {os.strerror(number) if number else error.os_error}.",
                "connection",
                hint="Start one with `llmkit serve MODEL`, or give its address with --url.",
            )
        if isinstance(error, (asyncio.TimeoutError, TimeoutError)):
            return RemoteError(f"{self.url} did not answer in time.", "timeout")
        return RemoteError(f"The connection to {self.url} broke: {error or type(error).__name__}.", "connection")


def chunk_of(data: bytes) -> Chunk:
    """A chunk of a stream. Raises RemoteError if it says that the request has failed, or makes no sense."""
    try:
        chunk = decode_chunk(data)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise RemoteError(f"The server has sent a chunk that cannot be read: {error}.", "stream") from error
    if chunk.error is not None:
        raise RemoteError(f"The answer broke off: {error_text(data)}", "stream")
    return chunk


def base_of(url: str) -> str:
    """A URL without `/v1` and slashes at its end; http where nothing is said. Raises ConfigError."""
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"--url {url!r} is not the address of a server.", hint="Such as http://127.0.0.1:8000.")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")
