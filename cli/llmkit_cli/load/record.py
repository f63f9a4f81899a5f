"""One request under the clock."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import aiohttp

from llmkit_cli.remote.errors import RemoteError
from llmkit_cli.remote.events import DONE, EventReader
from llmkit_cli.remote.server import RemoteServer, chunk_of


@dataclass
class RequestRecord:
    """What became of one request; times in seconds, begun from when it was sent.

    ttft: to its first token. itls: between arrivals of tokens after that, one for each chunk. e2el: to its last token.
    error_kind, error: why it failed. start: on the clock of time.perf_counter.
    """

    start: float
    ttft: float | None = None
    itls: list[float] = field(default_factory=list)
    e2el: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    num_chunks: int = 0
    error_kind: str | None = None
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None without such."""
        if self.ttft is None or self.output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.output_tokens - 1)


async def timed_request(server: RemoteServer, path: str, body: bytes) -> RequestRecord:
    """Send a streaming request and watch its answer arrive. Never raises: failures are in the record."""
    record = RequestRecord(time.perf_counter())
    try:
        await _receive(server, path, body, record)
    except RemoteError as error:
        record.error_kind, record.error = error.kind, str(error)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        problem = server.unreachable(error)
        record.error_kind, record.error = problem.kind, str(problem)
    return record


async def _receive(server: RemoteServer, path: str, body: bytes, record: RequestRecord) -> None:
    headers = {"content-type": "application/json"}
    async with server.session.post(server.url + path, data=body, headers=headers) as response:
        if response.status != 200:
            raise server.refusal(response.status, await response.read())
        reader, last = EventReader(), record.start
        async for piece in response.content.iter_any():
            now = time.perf_counter()
            for data in reader.feed(piece):
                if data == DONE:
                    _finish(record, last)
                    return
                chunk = chunk_of(data)
                if chunk.usage is not None:
                    record.prompt_tokens = chunk.usage.prompt_tokens
                    record.output_tokens = chunk.usage.completion_tokens
                for choice in chunk.choices:
                    if choice.brings_tokens:
                        if record.ttft is None:
                            record.ttft = now - record.start
                        else:
                            record.itls.append(now - last)
                        last = now
                        record.num_chunks += 1
    raise RemoteError("The answer broke off before its end.", "stream")


def _finish(record: RequestRecord, last: float) -> None:
    """A server that sends no usage has its chunks counted."""
    record.e2el = last - record.start
    record.output_tokens = record.output_tokens or record.num_chunks
    if record.ttft is None:
        raise RemoteError("The answer has ended without a single token.", "stream")
