"""A server under abuse of every kind at once; beside it a polite client, and afterwards a server like before.

    python benchmarks/serve_abuse.py --model MODEL [--seconds 300] [--rounds 1] [--at-once 12] [-- SERVER FLAGS]

Abusers take turns at random: bytes that are no HTTP, headers without end, connections that say nothing, bodies at the
limit, broken JSON, thousands of stop strings, prompts of megabytes, grammars and templates made to take for ever, wrong
keys, clients that go away at any moment. The polite client streams an answer again and again and asks for /health.
Prints JSON: for each kind of abuse the statuses it got, the longest wait for /health, seconds per step, memory of each
process before and after each round; before, every block of the cache has been written once, as its memory is taken
then. What an engine keeps of freed memory grows with its largest steps, which the first round has: the rounds after it
show whether anything else grows. Exit code 1 if a status is none that the abuse may get (never 500), a polite answer
differs from the undisturbed one, or requests, blocks, connections or busy processes are left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil
from serve_kills import Answer, read
from serve_load import settled
from serving import RunningServer, llmkit_server, what_is_left

from llmkit_cli.remote.server import RemoteServer

KEY = "a key"
LIMIT = 2**25
PATIENCE_S = 30.0
BLOCK_TOKENS = 16
POLITE = {
    "prompt": "The English alphabet: A B C D E F G", "max_tokens": 24, "temperature": 0, "stream": True,
    "return_token_ids": True,
}  # fmt: skip


def nested(depth: int) -> dict[str, Any]:
    """Alternatives in alternatives."""
    return (
        {"type": "null"} if not depth else {"oneOf": [nested(depth - 1), {"type": "array", "items": {"const": depth}}]}
    )


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
LONG = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}

REQUESTS: dict[str, tuple[str, dict[str, Any], set[int]]] = {
    "stop strings": ("/v1/completions", {"prompt": "a", "stop": [f"s{i}" for i in range(10_000)]}, {400}),
    "megabytes of prompt": ("/v1/completions", {"prompt": "word " * 1_600_000}, {400}),
    "many prompts": ("/v1/completions", {"prompt": ["a b c"] * 2048, "max_tokens": 1}, {200, 400, 429, 504}),
    "many answers": ("/v1/completions", {"prompt": "a", "n": 16384, "max_tokens": 1}, {400, 429}),
    "prompt log-probabilities": (
        "/v1/completions", {"prompt": [7] * 2000, "max_tokens": 1, "prompt_logprobs": 20}, {200, 400, 429, 504}
    ),
    "bias": ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): 100 for i in range(40_000)}}, {200, 400}),
    "huge expression": (
        "/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "((a{1,500}){1,500}){1,500}"}},
        {200, 400, 503},
    ),
    "deep expression": (
        "/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "(" * 3000 + "a" + "){1,500}" * 3000}},
        {400},
    ),
    "nested alternatives": (
        "/v1/chat/completions", CHAT | {"structured_outputs": {"json": nested(12)}}, {200, 400, 429, 503}
    ),
    "twenty thousand choices": (
        "/v1/chat/completions", CHAT | {"structured_outputs": {"choice": [f"c{i}" for i in range(20_000)]}},
        {200, 400, 429, 503},
    ),
    "template without end": (
        "/v1/chat/completions", CHAT | {"chat_template": "{% for i in range(99999) %}" * 2 + "x" + "{% endfor %}" * 2},
        {400},
    ),
    "template that grows": ("/v1/chat/completions", CHAT | {"chat_template": "{{ 'x' * 10 ** 12 }}"}, {400}),
    "text to count": ("/tokenize", {"prompt": "a " * 2_000_000}, {200, 400}),
    "many vectors": ("/v1/embeddings", {"input": ["a b c"] * 512}, {200, 429}),
    "wrong types": ("/v1/chat/completions", {"messages": 5, "tools": 3, "temperature": "hot"}, {400}),
    "background": ("/v1/responses", {"input": "hi", "background": True, "max_output_tokens": 64}, {200, 429}),
}  # fmt: skip

BODIES: dict[str, tuple[bytes, set[int]]] = {
    "body at the limit": (b'{"prompt": "' + b"x" * (LIMIT - 20) + b'"}', {400}),
    "body over the limit": (b'{"prompt": "' + b"x" * LIMIT + b'"}', {413}),
    "deep lists": (b'{"prompt": ' + b"[" * 500_000, {400}),
    "deep objects": (b'{"a":' * 200_000, {400}),
    "no UTF-8": (b'{"prompt": "\xff\xfe"}', {400}),
    "half a pair": (b'{"prompt": "\\ud83d"}', {400}),
    "a number too large": (b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}", {400}),
    "no JSON": (b"{", {400}),
}

BYTES: dict[str, tuple[bytes, set[int]]] = {
    "no HTTP": (random.Random(0).randbytes(4000), {400}),
    "headers without end": (b"GET /health HTTP/1.1\r\nhost: a\r\n" + b"x-a: b\r\n" * 60_000, {431}),
    "one long header": (b"GET /health HTTP/1.1\r\nhost: a\r\nx-a: " + b"b" * 600_000, {431}),
    "two lengths": (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 7\r\n\r\nhello", {400}),
    "a wrong chunk": (b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", {400, 401}),
}


class Abuse:
    """One round of any kind; `statuses` counts what came back, `wrong` what must not."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._url, self._session = url, session
        self.statuses: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.wrong: Counter[str] = Counter()
        kinds: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            *((name, lambda name=name: self._request(name)) for name in REQUESTS),
            *((name, lambda name=name: self._body(name)) for name in BODIES),
            *((name, lambda name=name: self._raw(name)) for name in BYTES),
            ("wrong keys", self._wrong_key),
            ("connections that say nothing", self._silence),
            ("clients that go away", self._leavers),
            ("bodies that do not come", self._slow_body),
        ]  # type: ignore[misc]
        self._kinds = kinds

    async def run(self, number: int, end: float) -> None:
        rng = random.Random(number)
        while time.monotonic() < end:
            name, act = rng.choice(self._kinds)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await act()
            except TimeoutError:
                self.statuses[name]["gave up"] += 1  # a client may; the server must forget the request
            except (aiohttp.ClientError, OSError) as error:
                self._note(name, type(error).__name__, set())

    def _note(self, name: str, status: int | str, allowed: set[int]) -> None:
        self.statuses[name][str(status)] += 1
        if status not in allowed:
            self.wrong[f"{name}: {status}"] += 1

    async def _request(self, name: str) -> None:
        path, body, allowed = REQUESTS[name]
        async with self._session.post(self._url + path, json=body) as response:
            await response.read()
            self._note(name, response.status, allowed)

    async def _body(self, name: str) -> None:
        body, allowed = BODIES[name]
        headers = {"content-type": "application/json"}
        try:
            async with self._session.post(self._url + "/v1/completions", data=body, headers=headers) as response:
                await response.read()
                self._note(name, response.status, allowed)
        except (aiohttp.ClientConnectionError, ConnectionError):
            if 413 not in allowed:
                raise
            self.statuses[name]["hung up"] += 1  # while the rest was still being sent

    async def _raw(self, name: str) -> None:
        data, allowed = BYTES[name]
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(data)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            try:
                line = await reader.readline()
            except ConnectionError:
                self.statuses[name]["hung up"] += 1  # the answer was lost, as bytes were still being sent
                return
            self._note(name, int(line.split()[1]) if line else "nothing", allowed)
        finally:
            writer.close()

    async def _wrong_key(self) -> None:
        for key in ("", "Bearer", "Bearer ", "Bearer a kez", "Basic a key", "Bearer " + "k" * 8000, "Bearer ü"):
            headers = {"authorization": key}
            async with self._session.post(self._url + "/v1/completions", json=POLITE, headers=headers) as response:
                self._note("wrong keys", response.status, {401})

    async def _silence(self) -> None:
        """Fifty at a time, a byte now and then."""
        pairs = [await asyncio.open_connection(self._host, self._port) for _ in range(50)]
        with contextlib.suppress(ConnectionError):
            for _ in range(20):
                for _, writer in pairs:
                    writer.write(b"G")
                await asyncio.sleep(0.2)
        for _, writer in pairs:
            writer.close()
        self.statuses["connections that say nothing"]["left"] += len(pairs)

    async def _slow_body(self) -> None:
        _, writer = await asyncio.open_connection(self._host, self._port)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {KEY}\r\n"
        writer.write(head.encode() + b"content-type: application/json\r\ncontent-length: 1000000\r\n\r\n{")
        await asyncio.sleep(random.random() * 5)
        writer.transport.abort()
        self.statuses["bodies that do not come"]["left"] += 1

    async def _leavers(self) -> None:
        async def leaver() -> None:
            path, body = random.choice(
                [("/v1/completions", LONG), ("/v1/chat/completions", CHAT | {"max_tokens": 500})]
            )
            with contextlib.suppress(TimeoutError):
                async with (
                    asyncio.timeout(random.random() * 4),
                    self._session.post(self._url + path, json=body) as response,
                ):
                    self._note("clients that go away", response.status, {200, 429})
                    await response.read()

        await asyncio.gather(*(leaver() for _ in range(20)))


class Polite:
    """A client that does nothing wrong. counts: its answers, by what they were like; health_s: its longest wait for
    /health."""

    def __init__(self, server: RemoteServer, expected: Answer) -> None:
        self._server, self._expected = server, expected
        self.counts: Counter[str] = Counter()
        self.health_s = 0.0

    async def run(self, end: float) -> None:
        while time.monotonic() < end:
            begun = time.monotonic()
            async with self._server.session.get(self._server.url + "/health") as response:
                self.counts[f"health {response.status}"] += 1
            self.health_s = max(self.health_s, time.monotonic() - begun)
            try:
                same = await read(self._server, POLITE) == self._expected
            except Exception as error:
                self.counts["refused" if getattr(error, "kind", "") == "429" else f"error: {error}"] += 1
                await asyncio.sleep(0.5)
                continue
            self.counts["same" if same else "different"] += 1


def cpu_seconds(running: RunningServer) -> float:
    """Of the server and all its processes."""
    total = 0.0
    for process in (running.process, *running.process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


async def idle_load(running: RunningServer) -> float:
    """Processors in use while nothing is asked for."""
    begun, before = time.monotonic(), cpu_seconds(running)
    await asyncio.sleep(5.0)
    return (cpu_seconds(running) - before) / (time.monotonic() - begun)


async def fill_cache(server: RemoteServer) -> int:
    """Write every block of the cache. Returns the steps so far."""
    before = await settled(server)
    rng, length = random.Random(1), 2000
    for _ in range(before["num_blocks"] * BLOCK_TOKENS // length + 1):
        body = {"prompt": [rng.randrange(10, 30_000) for _ in range(length)], "max_tokens": 1}
        async with server.session.post(server.url + "/v1/completions", json=body) as response:
            response.raise_for_status()
    return int((await settled(server))["num_steps"])


async def one_round(abuse: Abuse, polite: Polite, arguments: argparse.Namespace, number: int) -> float:
    """All abusers and the polite client for a while; the seconds that it took."""
    begun = time.monotonic()
    end = begun + arguments.seconds
    async with asyncio.TaskGroup() as group:
        group.create_task(polite.run(end))
        for abuser in range(arguments.at_once):
            group.create_task(abuse.run(abuser + number * arguments.at_once, end))
    return time.monotonic() - begun


async def measure(running: RunningServer, arguments: argparse.Namespace) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {KEY}"}
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with (
        RemoteServer(running.url, KEY) as server,
        aiohttp.ClientSession(connector=connector, headers=headers) as session,
    ):
        expected = await read(server, POLITE)
        abuse, polite = Abuse(running.url, session), Polite(server, expected)
        steps = await fill_cache(server)
        before = running.resident_by_process()
        ended, rounds = 0.0, []
        for number in range(arguments.rounds):
            ended += await one_round(abuse, polite, arguments, number)
            left = await settled(server)
            rounds.append(running.resident_by_process())
        step_s = ended / max(1, left["num_steps"] - steps)
        after = await read(server, POLITE)
        polite.counts["same" if after == expected else "different"] += 1
        await session.close()
        load = await idle_load(running)
        connections = sum(c.status == "ESTABLISHED" for c in running.process.net_connections("tcp"))
    return {
        "seconds": arguments.seconds, "statuses": {name: dict(counts) for name, counts in abuse.statuses.items()},
        "wrong": dict(abuse.wrong), "polite": dict(polite.counts), "longest_health_s": round(polite.health_s, 2),
        "seconds_per_step": round(step_s, 2),
        "mib_before": before, "mib_after_rounds": rounds, "load_when_idle": round(load, 3),
        "connections": connections, "afterwards": left,
    }  # fmt: skip


def problems(result: dict[str, Any]) -> list[str]:
    """What is not as it must be."""
    after = result["afterwards"]
    found = [f"{count} × {what}" for what, count in result["wrong"].items()]
    found += [
        f"{count} × polite: {what}" for what, count in result["polite"].items() if what.startswith(("error", "diff"))
    ]
    found += what_is_left(after)
    if result["load_when_idle"] > 0.2:
        found.append("something is still busy")
    if result["connections"] > 1:
        found.append("connections are left")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Abuse of every kind at once.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--rounds", type=int, default=1, help="as many times so many seconds")
    parser.add_argument("--at-once", type=int, default=12, help="abusers at a time")
    parser.add_argument("flags", nargs="*", help="flags of llmkit serve, behind --")
    arguments = parser.parse_args()
    flags = ["--enable-control-endpoints", "--num-blocks", "1200", "--api-key", KEY, *arguments.flags]
    with llmkit_server(arguments.model, flags) as running:
        result = asyncio.run(measure(running, arguments))
    result["problems"] = problems(result)
    print(json.dumps(result, indent=2))
    sys.exit(bool(result["problems"]))


if __name__ == "__main__":
    main()
