"""Clients that keep connections and do not use them, or speak no HTTP."""

from __future__ import annotations

import asyncio
import json
import unittest.mock

import pytest
from uvicorn.server import ServerState

from llmkit_server.connection import Connection
from llmkit_server.limits import MAX_HEAD_BYTES
from llmkit_server.run import Server, uvicorn_config

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 500}


def post(body, head=b"", path=b"/v1/chat/completions"):
    data = json.dumps(body).encode()
    return b"POST %s HTTP/1.1\r\nHost: x\r\ncontent-type: application/json\r\n%scontent-length: %d\r\n\r\n%s" % (
        path,
        head,
        len(data),
        data,
    )


@pytest.fixture
def listen(served):
    """Calls `use(connect)` with a server on a loopback port."""

    def run(use, max_connections=1000):
        async def main():
            served.engine._changed = asyncio.Event()
            config = uvicorn_config(served.app, served.context.settings)
            config.http = type("Limited", (Connection,), {"max_connections": max_connections})
            config.port = 0
            ready = asyncio.Event()
            server = Server(config, served.context, 5.0, ready.set)
            task = asyncio.create_task(server.serve())
            await ready.wait()
            port = server.servers[0].sockets[0].getsockname()[1]
            try:
                return await asyncio.wait_for(use(lambda: asyncio.open_connection("127.0.0.1", port)), 60)
            finally:
                server.should_exit = True
                await task

        return asyncio.run(main())

    return run


async def answer(reader):
    """Status, headers and body of the next response."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    return int(head[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


async def refused(reader):
    """Status and message of an error, behind which the connection is closed."""
    status, headers, body = await answer(reader)
    assert headers["connection"] == "close"
    assert await reader.read() == b""
    error = json.loads(body)["error"]
    assert error["code"] == status
    return status, error["message"]


@pytest.mark.parametrize(
    "pieces",
    [
        [b""],
        [b"GET /health HTTP/1.1\r\nX: "],
        [b"\r\n"],
        [HEALTH, b"G"],
        [HEALTH, b"\r\n"],
        [HEALTH + b"GET / HTTP/1.1\r\nX:"],
    ],
)
def test_a_head_that_does_not_come(listen, monkeypatch, pieces):
    """Neither on a new connection nor where one has begun."""
    monkeypatch.setattr("llmkit_server.connection.HEAD_TIMEOUT_S", 0.1)

    async def use(connect):
        reader, writer = await connect()
        for piece in pieces:
            writer.write(piece)
            if piece.startswith(HEALTH):
                assert (await answer(reader))[0] == 200
        status, message = await refused(reader)
        writer.close()
        return status, message

    assert listen(use) == (408, "No request has arrived within 0.1 s.")


def test_a_connection_that_is_idle_is_kept_and_then_closed_without_a_word(served, listen, monkeypatch):
    monkeypatch.setattr("llmkit_server.connection.HEAD_TIMEOUT_S", 0.05)
    served.context.settings = served.context.settings.model_copy(update={"keep_alive_s": 1})

    async def use(connect):
        reader, writer = await connect()
        for pause_s in (0.2, 0.0):
            writer.write(HEALTH)
            assert (await answer(reader))[0] == 200
            await asyncio.sleep(pause_s)
        left = await reader.read()
        writer.close()
        return left

    assert listen(use) == b""


def test_the_time_for_a_head_does_not_end_an_answer(served, listen, monkeypatch):
    monkeypatch.setattr("llmkit_server.connection.HEAD_TIMEOUT_S", 0.05)
    served.engine.hold = True

    async def use(connect):
        reader, writer = await connect()
        writer.write(post(CHAT) + HEALTH)  # the second request waits behind the first
        await asyncio.sleep(0.2)
        served.engine.hold = False
        served.engine._changed.set()
        statuses = [(await answer(reader))[0] for _ in range(2)]
        writer.close()
        return statuses

    assert listen(use) == [200, 200]


@pytest.mark.parametrize("head", [b"X: " + b"y" * 400_000, b"X: y\r\n" * 70_000])
def test_a_head_without_end(listen, head):
    async def use(connect):
        reader, writer = await connect()
        writer.write(b"GET /health HTTP/1.1\r\n" + head)
        status, message = (await answer(reader))[0], None
        writer.close()
        return status, message

    assert listen(use)[0] == 431


@pytest.mark.parametrize(
    ("num_bytes", "status"), [(MAX_HEAD_BYTES - 100, 200), (MAX_HEAD_BYTES, 431), (300_000, 431), (2_000_000, 431)]
)
@pytest.mark.parametrize("first", [b"", HEALTH])
def test_the_limit_of_headers_is_exact(listen, num_bytes, status, first):
    """However the bytes arrive; a client that sends all before it reads learns why it was refused."""

    async def use(connect):
        reader, writer = await connect()
        if first:
            writer.write(first)
            assert (await answer(reader))[0] == 200
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * num_bytes + b"\r\n\r\n")
        await writer.drain()
        found = (await answer(reader))[0] if status == 200 else (await refused(reader))[0]
        writer.close()
        return found

    assert listen(use) == status


def test_a_refused_client_that_never_closes_is_cut_off(listen, monkeypatch):
    monkeypatch.setattr("llmkit_server.connection.LINGER_S", 0.05)

    async def use(connect):
        reader, writer = await connect()
        writer.write(b"no HTTP\r\n\r\n")
        assert (await refused(reader))[0] == 400
        for _ in range(100):
            writer.write(b"more")
            await writer.drain()
            await asyncio.sleep(0.02)

    with pytest.raises(ConnectionError):
        listen(use)


@pytest.mark.parametrize("line", [b"GET /" + b"y" * 100_000, b"GET /health?" + b"y" * 65_536])
def test_a_request_line_that_is_too_long(listen, line):
    async def use(connect):
        reader, writer = await connect()
        writer.write(line + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        result = await refused(reader)
        writer.close()
        return result

    assert listen(use) == (414, "Path and query are longer than 65535 bytes.")


def test_a_large_body_after_its_answer_is_no_head(listen):
    async def use(connect):
        reader, writer = await connect()
        writer.write(post({"x": "y" * 2_000_000}, path=b"/nosuch"))
        first = await answer(reader)
        writer.write(HEALTH)
        second = await answer(reader)
        writer.close()
        return first[0], second[0]

    assert listen(use) == (404, 200)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        post(CHAT, b"Content-Length: 5\r\n"),
        post(CHAT, b"Transfer-Encoding: chunked\r\n"),
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\ncontent-type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\x0bb\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_an_error_of_the_usual_form(listen, data):
    async def use(connect):
        reader, writer = await connect()
        writer.write(data)
        result = await refused(reader)
        writer.close()
        return result

    assert listen(use) == (400, "The request is not valid HTTP.")


def test_connections_beyond_the_limit_are_refused(listen):
    async def use(connect):
        first, second = await connect(), await connect()
        third = await connect()
        result = await refused(third[0])
        first[1].close()
        await first[1].wait_closed()
        second[1].write(HEALTH)
        assert (await answer(second[0]))[0] == 200
        fourth = await connect()
        fourth[1].write(HEALTH)
        again = await answer(fourth[0])
        for _, writer in (second, third, fourth):
            writer.close()
        return result, again[0]

    assert listen(use, 2) == ((503, "The server has as many connections as it takes."), 200)


@pytest.mark.parametrize("reads", [False, True])
def test_a_client_that_reads_nothing_is_given_up(served, monkeypatch, reads):
    """Its connection is cut, which ends its request as if it had gone away; one that reads again keeps it."""
    monkeypatch.setattr("llmkit_server.connection.READER_TIMEOUT_S", 0.05)

    async def main():
        config = uvicorn_config(served.app, served.context.settings)
        config.load()
        connection = Connection(config, ServerState(), {})
        transport = unittest.mock.Mock(asyncio.Transport, is_closing=lambda: False)
        connection.connection_made(transport)
        connection.pause_writing()
        if reads:
            connection.resume_writing()
        await asyncio.sleep(0.1)
        connection.connection_lost(None)
        return transport.abort.called

    assert asyncio.run(main()) is not reads
