"""A server whose engine process is killed again and again: every stream must read as if nothing had happened.

    python benchmarks/serve_kills.py --model MODEL [--streams 64] [--seconds 300] [--every 20] [--signal KILL] [-- ...]

First every request is answered undisturbed, all of them at once. Then each stream sends its own request over and over
while the engine process gets the signal every so many seconds (STOP: it hangs, and must be noticed by its silence).
Requests are greedy and seeded by turns. Prints JSON: answers, kills, restarts, and where an answer parts from the
undisturbed one. At last the server is killed itself: how long processes of it are left. Exit code 1 if a stream has
failed, an answer differs, requests or blocks are left, or a process outlives the server by 10 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
import psutil
from serve_load import settled
from serving import RunningServer, llmkit_server, what_is_left

from llmkit_cli.remote.errors import RemoteError
from llmkit_cli.remote.events import DONE, EventReader
from llmkit_cli.remote.server import RemoteServer

SUBJECTS = ("a lighthouse", "two brothers", "the last train", "a clock", "the river", "an old teacher", "winter", "tea")
ANSWER = (64, 160)
ORPHANS_S = 10.0


def requests_of(count: int, model: str) -> list[dict[str, Any]]:
    """As many requests, each another one; every second one draws its tokens."""
    rng = random.Random(0)
    return [
        {
            "model": model, "prompt": f"Story {i}, about {SUBJECTS[i % len(SUBJECTS)]}: Once upon a time",
            "max_tokens": rng.randint(*ANSWER), "ignore_eos": True, "stream": True, "return_token_ids": True,
            "temperature": 0.9 * (i % 2), "seed": i,
        }
        for i in range(count)
    ]  # fmt: skip


@dataclass
class Answer:
    """What a client has read. Compared whole."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def take(self, data: bytes) -> None:
        event = msgspec.json.decode(data)
        if "error" in event:
            raise RemoteError(f"The answer broke off: {event['error']['message']}", "stream")
        for choice in event["choices"]:
            self.text += choice["text"]
            self.token_ids += choice.get("token_ids") or ()
            self.finish_reason = choice["finish_reason"] or self.finish_reason


async def read(server: RemoteServer, body: dict[str, Any]) -> Answer:
    """The whole answer. Raises RemoteError if it breaks off."""
    answer, reader = Answer(), EventReader()
    async with server.session.post(server.url + "/v1/completions", json=body) as response:
        if response.status != 200:
            raise server.refusal(response.status, await response.read())
        async for piece in response.content.iter_any():
            for data in reader.feed(piece):
                if data == DONE:
                    return answer
                answer.take(data)
    raise RemoteError("The answer broke off before its end.", "stream")


class Trial:
    """The disturbed part. answers: counts of equal ones and of others; differences: where the others part."""

    def __init__(self, server: RemoteServer, bodies: list[dict[str, Any]], expected: list[Answer]) -> None:
        self._server, self._bodies, self._expected = server, bodies, expected
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.differences: list[dict[str, int]] = []

    async def stream(self, number: int, end: float) -> None:
        while time.monotonic() < end:
            try:
                answer = await read(self._server, self._bodies[number])
            except (RemoteError, OSError) as error:
                if getattr(error, "kind", "") == "503":  # new ones are told to come again
                    self.counts["refused while it starts"] += 1
                else:
                    self.errors[str(error)] += 1
                await asyncio.sleep(1.0)
                continue
            expected = self._expected[number]
            same = answer == expected
            self.counts["equal" if same else "different"] += 1
            if not same:
                pairs = zip(answer.token_ids, expected.token_ids, strict=False)
                parts_at = next((i for i, (one, other) in enumerate(pairs) if one != other), -1)
                lengths = {"tokens": len(answer.token_ids), "expected_tokens": len(expected.token_ids)}
                self.differences.append({"request": number, "parts_at": parts_at, **lengths})

    async def kill(self, running: RunningServer, number: signal.Signals, every_s: float, end: float) -> None:
        while time.monotonic() + every_s < end:
            await asyncio.sleep(every_s)
            engine = running.engine()
            if engine is None:
                self.counts["no engine to kill"] += 1
                continue
            engine.send_signal(number)
            self.counts["kills"] += 1


async def restarts(server: RemoteServer) -> int:
    async with server.session.get(server.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return next(int(float(line.split()[-1])) for line in lines if line.startswith("llmkit:engine_restarts_total{"))


async def measure(running: RunningServer, arguments: argparse.Namespace) -> dict[str, Any]:
    async with RemoteServer(running.url) as server:
        bodies = requests_of(arguments.streams, await server.served_model(None))
        expected = await asyncio.gather(*(read(server, body) for body in bodies))
        trial = Trial(server, bodies, expected)
        begun = time.monotonic()
        end = begun + arguments.seconds
        async with asyncio.TaskGroup() as group:
            group.create_task(trial.kill(running, signal.Signals[f"SIG{arguments.signal}"], arguments.every, end))
            for number in range(arguments.streams):
                group.create_task(trial.stream(number, end))
        return {
            "streams": arguments.streams, "signal": arguments.signal, "seconds": round(time.monotonic() - begun, 1),
            **trial.counts, "restarts": await restarts(server), "errors": dict(trial.errors),
            "differences": trial.differences, "afterwards": await settled(server),
        }  # fmt: skip


def seconds_until_gone(running: RunningServer) -> float:
    """Kill the server; how long until none of its processes is left, at most ORPHANS_S + 5."""
    left = running.process.children(recursive=True)
    running.process.kill()
    begun = time.monotonic()
    psutil.wait_procs(left, timeout=ORPHANS_S + 5)
    return time.monotonic() - begun


def problems(result: dict[str, Any]) -> list[str]:
    """What is not as it must be."""
    after = result["afterwards"]
    found = [f"{count} × {what}" for what, count in result["errors"].items()]
    found += [f"{result['different']} answers differ"] if result.get("different") else []
    found += ["there was no restart"] if not result["restarts"] else []
    found += what_is_left(after)
    if result["gone_after_s"] > ORPHANS_S:
        found.append("processes have outlived the server")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Streams whose engine process is killed.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--every", type=float, default=20, help="seconds between two kills")
    parser.add_argument("--signal", choices=("KILL", "STOP", "SEGV"), default="KILL")
    parser.add_argument("flags", nargs="*", help="flags of llmkit serve, behind --")
    arguments = parser.parse_args()
    with llmkit_server(arguments.model, ["--enable-control-endpoints", *arguments.flags], ends_well=False) as running:
        result = asyncio.run(measure(running, arguments))
        result["gone_after_s"] = round(seconds_until_gone(running), 2)
    result["problems"] = problems(result)
    print(json.dumps(result, indent=2))
    sys.exit(bool(result["problems"]))


if __name__ == "__main__":
    main()
