"""A server under many streams, some of whose clients go away: no errors, flat memory, and nothing left behind.

    python benchmarks/serve_load.py --model MODEL [--streams 256] [--seconds 300] [--leave 0.1] [-- SERVER FLAGS]

Each stream sends one completion after the other: 16 to 128 random tokens in, 16 to 64 out. One in ten clients goes away
at a random moment, before or after its first token. Memory is sampled every second from the end of the warm-up on; what
counts is its growth from the first to the last third. A page of the KV cache takes memory only once it is used: the
warm-up lasts until the engine has taken in twice as many tokens as the cache, which is small (800 blocks), holds.
Prints JSON; exit code 1 if a request has failed with anything but 429, if memory has grown by more than 3 %, or if
requests or blocks are left at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
from collections import Counter
from typing import Any

from serving import RunningServer, llmkit_server, what_is_left

from llmkit_cli.remote.errors import RemoteError
from llmkit_cli.remote.server import RemoteServer

PROMPT, ANSWER = (16, 128), (16, 64)
VOCABULARY = 30_000
WARM_UP_FILLS = 2
NUM_BLOCKS = "800"
MAX_GROWTH = 0.03
LONGEST_WAIT_S = 60.0


class Load:
    """What the streams do, and what became of it."""

    def __init__(self, server: RemoteServer, model: str, leave: float) -> None:
        self._server = server
        self._model = model
        self._leave = leave
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()

    async def stream(self, number: int, over: asyncio.Event) -> None:
        """One client after the other, until `over`."""
        rng = random.Random(number)
        while not over.is_set():
            leaves = rng.random() < self._leave
            try:
                await (self._leaver(rng) if leaves else self._reader(rng))
            except RemoteError as error:
                self.errors[error.kind if error.kind == "429" else str(error)] += 1
                await asyncio.sleep(rng.random())

    def _body(self, rng: random.Random) -> dict[str, Any]:
        prompt = [rng.randrange(10, VOCABULARY) for _ in range(rng.randint(*PROMPT))]
        return {
            "model": self._model, "prompt": prompt, "max_tokens": rng.randint(*ANSWER), "ignore_eos": True,
            "temperature": 0.8, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip

    async def _reader(self, rng: random.Random) -> None:
        body = self._body(rng)
        used = 0
        async for chunk in self._server.stream("/v1/completions", body):
            used = chunk.usage.completion_tokens if chunk.usage is not None else used
        self.counts["completed"] += 1
        self.counts["tokens"] += used
        if used != body["max_tokens"]:
            self.errors[f"{used} tokens instead of {body['max_tokens']}"] += 1

    async def _leaver(self, rng: random.Random) -> None:
        """Goes away after some seconds, or after some chunks, whichever comes first."""
        chunks = rng.randint(1, ANSWER[1])
        stream = self._server.stream("/v1/completions", self._body(rng))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.uniform(0, 10)), contextlib.aclosing(stream):
                async for _ in stream:
                    chunks -= 1
                    if not chunks:
                        break
        self.counts["left"] += 1


async def warm_up(server: RemoteServer) -> float:
    """Until every page of the KV cache has been used; the seconds that this took."""
    begun = time.monotonic()
    async with server.session.get(server.url + "/server_info") as response:
        stats = (await response.json())["stats"]
    enough = WARM_UP_FILLS * stats["num_blocks"] * stats["block_size"]
    while await num_tokens(server) < enough:
        await asyncio.sleep(1.0)
    return time.monotonic() - begun


async def num_tokens(server: RemoteServer) -> int:
    """Tokens of prompts and answers that the server has counted."""
    async with server.session.get(server.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    names = ("llmkit:prompt_tokens_total{", "llmkit:generation_tokens_total{")
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith(names)))


async def watch_memory(running: RunningServer, seconds: float) -> list[tuple[float, float, float]]:
    """Seconds, MiB of the HTTP server and of its children, once a second."""
    begun = time.monotonic()
    samples = []
    while (now := time.monotonic() - begun) < seconds:
        samples.append((now, *running.resident_mib()))
        await asyncio.sleep(1.0)
    return samples


async def settled(server: RemoteServer) -> dict[str, Any]:
    """The engine's numbers once nothing is under way, or after a while."""
    begun = time.monotonic()
    while True:
        async with server.session.get(server.url + "/load") as response:
            load = (await response.json())["server_load"]
        async with server.session.get(server.url + "/server_info") as response:
            stats: dict[str, Any] = (await response.json())["stats"]
        if (load == 0 and stats["num_unfinished"] == 0) or time.monotonic() - begun > LONGEST_WAIT_S:
            kept = (
                "num_running",
                "num_waiting",
                "num_unfinished",
                "num_blocks",
                "num_free_blocks",
                "num_steps",
                "num_failed_steps",
            )
            return {"server_load": load, "settled_s": time.monotonic() - begun, **{key: stats[key] for key in kept}}
        await asyncio.sleep(0.05)


def growth(samples: list[tuple[float, float, float]]) -> dict[str, Any]:
    """MiB of the HTTP server and of the engine: in the first and in the last third, the most, and the growth."""
    third = max(1, len(samples) // 3)
    result = {}
    for column, name in ((1, "http_server"), (2, "engine")):
        first, last = (statistics.median(s[column] for s in part) for part in (samples[:third], samples[-third:]))
        most = max(sample[column] for sample in samples)
        result[name] = {
            "first_mib": round(first, 1), "last_mib": round(last, 1), "most_mib": round(most, 1),
            "growth": round(last / first - 1, 4),
        }  # fmt: skip
    return result


async def measure(running: RunningServer, arguments: argparse.Namespace) -> dict[str, Any]:
    over = asyncio.Event()
    async with RemoteServer(running.url) as server:
        load = Load(server, await server.served_model(None), arguments.leave)
        begun = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(arguments.streams):
                group.create_task(load.stream(number, over))
            warm_up_s = await warm_up(server)
            samples = await watch_memory(running, arguments.seconds)
            over.set()
        seconds = time.monotonic() - begun
        left = await settled(server)
    return {
        "streams": arguments.streams, "seconds": round(seconds, 1), "warm_up_s": round(warm_up_s, 1), **load.counts,
        "output_tok_s": round(load.counts["tokens"] / seconds, 1), "errors": dict(load.errors),
        "memory": growth(samples), "afterwards": left,
    }  # fmt: skip


def problems(result: dict[str, Any]) -> list[str]:
    """What is not as it must be."""
    after = result["afterwards"]
    found = [f"{count} × {what}" for what, count in result["errors"].items() if what != "429"]
    found += [
        f"memory of the {name} has grown by {memory['growth']:.1%}"
        for name, memory in result["memory"].items()
        if memory["growth"] > MAX_GROWTH
    ]
    found += what_is_left(after)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Many streams, some of whose clients go away.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=300, help="after the warm-up")
    parser.add_argument("--leave", type=float, default=0.1, help="part of the clients that go away")
    parser.add_argument("flags", nargs="*", help="flags of llmkit serve, behind --")
    arguments = parser.parse_args()
    with llmkit_server(
        arguments.model, ["--enable-control-endpoints", "--num-blocks", NUM_BLOCKS, *arguments.flags]
    ) as running:
        result = asyncio.run(measure(running, arguments))
    result["problems"] = problems(result)
    print(json.dumps(result, indent=2))
    sys.exit(bool(result["problems"]))


if __name__ == "__main__":
    main()
