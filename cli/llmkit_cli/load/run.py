"""Sending a load."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmkit_cli.load.record import RequestRecord, timed_request
from llmkit_cli.remote.server import RemoteServer


@dataclass(frozen=True)
class LoadRun:
    """What a load has brought. duration: seconds from the first request to the end of the last answer. client_load:
    the part of that time in which this process was busy; near 1, it measures itself. max_concurrent: most requests
    under way at once."""

    records: list[RequestRecord]
    duration: float
    client_load: float
    max_concurrent: int


async def run_load(
    server: RemoteServer,
    path: str,
    bodies: Sequence[bytes],
    arrivals: Sequence[float],
    max_concurrency: int | None = None,
    done: Callable[[RequestRecord], None] | None = None,
) -> LoadRun:
    """Send each body at its time, at most `max_concurrency` at once: what is due then waits, and its own time begins
    when it is sent. done: called with each that has ended. Cancelled, it ends all that is under way."""
    room = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    running, most = 0, 0

    async def one(body: bytes) -> RequestRecord:
        nonlocal running, most
        async with room:
            running += 1
            most = max(most, running)
            try:
                record = await timed_request(server, path, body)
            finally:
                running -= 1
        if done is not None:
            done(record)
        return record

    begun, busy = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for body, due in zip(bodies, arrivals, strict=True):
            wait = begun + due - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(one(body)))
    duration = time.perf_counter() - begun
    records = [task.result() for task in tasks]
    return LoadRun(records, duration, (time.process_time() - busy) / duration, most)
