"""A small server with the API of OpenAI, in a thread of this process, that does what a test tells it to."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

PIECES = [" one", " two", " three"]


class FakeServer:
    """requests: bodies in the order of arrival, keys: their Authorization headers.

    statuses: for the next requests, 200 once there are none. broken: streams end before [DONE]. held: nothing is
    answered. most: most requests that were open at once.
    """

    def __init__(self) -> None:
        self.url = ""
        self.models: list[str] | None = ["fake"]
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.statuses: list[int] = []
        self.broken = False
        self.held = False
        self.silent = False
        self.with_usage = True
        self.most = 0
        self._open = 0

    async def list_models(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("authorization"))
        if self.models is None:
            return web.json_response({"error": {"message": "Give a key."}}, status=401)
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        self.paths.append(request.path)
        self._open += 1
        self.most = max(self.most, self._open)
        try:
            return await self._answer(request)
        finally:
            self._open -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        status = self.statuses.pop(0) if self.statuses else 200
        if status != 200:
            return web.json_response({"error": {"message": f"refused with {status}"}}, status=status)
        if self.held:
            await asyncio.Event().wait()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for chunk in self._chunks(request.path):
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
            await asyncio.sleep(0)
        if not self.broken:
            await response.write(b"data: [DONE]\n\n")
        return response

    def _chunks(self, path: str) -> Iterator[dict[str, Any]]:
        is_chat = path.endswith("/chat/completions")
        if is_chat:
            yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        for text in [] if self.silent else PIECES:
            part = {"delta": {"content": text}} if is_chat else {"text": text}
            yield {"choices": [{"index": 0, **part, "finish_reason": None}], "usage": None}
        end = {"delta": {}} if is_chat else {"text": ""}
        yield {"choices": [{"index": 0, **end, "finish_reason": "stop"}]}
        if self.with_usage:
            yield {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}}


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    started = threading.Event()
    loop = asyncio.new_event_loop()

    async def main() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", server.list_models)
        app.router.add_post("/v1/completions", server.answer)
        app.router.add_post("/v1/chat/completions", server.answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ended = asyncio.Event()
        loop.call_soon(started.set)
        server.stop = lambda: loop.call_soon_threadsafe(ended.set)  # type: ignore[attr-defined]
        await ended.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), name="fake server")
    thread.start()
    assert started.wait(30)
    yield server
    server.stop()  # type: ignore[attr-defined]
    thread.join(30)
    loop.close()


@pytest.fixture
def no_api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
