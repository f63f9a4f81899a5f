"""Running a batch: lines in, the journal in between, results out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from llmkit.errors import ConfigError, EngineDeadError
from llmkit_cli.batch.journal import Journal
from llmkit_cli.batch.lines import URLS, BatchRequest, LineError, answered, parse_line, unanswered

RETRY_S = 1.0
_LATER = (429, 503)


class Responder(Protocol):
    """What answers the requests, as an HTTP server would."""

    @property
    def paths(self) -> frozenset[str]: ...

    async def post(self, path: str, body: bytes) -> tuple[int, Mapping[str, str], bytes]: ...


@dataclass
class BatchSummary:
    """completed: answered with 200, failed: everything else, resumed: taken over from an earlier run."""

    completed: int = 0
    failed: int = 0
    resumed: int = 0


def input_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers from 0. Raises ConfigError."""
    try:
        with open(file, "rb") as lines:
            for number, line in enumerate(lines):
                if line.strip():
                    yield number, line.strip()
    except OSError as error:
        raise ConfigError(f"The batch file {file} cannot be read: {error.strerror}.") from error


class BatchRun:
    """One run over one file. concurrency: lines under way at a time. is_alive: whether it is worth asking again when
    the responder has no room or is being started again. done: called for each line."""

    def __init__(
        self,
        responder: Responder,
        journal: Journal,
        *,
        concurrency: int,
        is_alive: Callable[[], bool] = lambda: True,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        self._responder = responder
        self._journal = journal
        self._concurrency = concurrency
        self._is_alive = is_alive
        self._done = done
        self._urls = frozenset(URLS) & responder.paths
        self._ids: set[str] = set()
        self.summary = BatchSummary()

    async def run(self, file: Path) -> list[int]:
        """Answer every line that has no result yet; the numbers of all lines. Raises ConfigError, EngineDeadError."""
        numbers: list[int] = []
        lines = input_lines(file)

        async def work() -> None:
            for number, line in lines:  # shared: each worker takes the next one
                numbers.append(number)
                await self._line(number, line)
                self._done()

        workers = [asyncio.create_task(work()) for _ in range(self._concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return sorted(numbers)

    async def _line(self, number: int, line: bytes) -> None:
        try:
            request = parse_line(line, self._urls)
            if request.custom_id in self._ids:
                raise LineError(f"custom_id {request.custom_id!r} stands in an earlier line.", request.custom_id)
        except LineError as error:
            self.summary.failed += 1
            self._journal.add(number, line, unanswered(error), final=False)
            return
        self._ids.add(request.custom_id)
        if self._journal.has(number, line):
            self.summary.resumed += 1
            return
        status, headers, body = await self._answer(request)
        if status == 200:
            self.summary.completed += 1
        else:
            self.summary.failed += 1
        result = answered(request.custom_id, status, headers, body)
        self._journal.add(number, line, result, final=status < 500)

    async def _answer(self, request: BatchRequest) -> tuple[int, Mapping[str, str], bytes]:
        while True:
            status, headers, body = await self._responder.post(request.url, request.body)
            if status not in _LATER:
                return status, headers, body
            if not self._is_alive():
                raise EngineDeadError("The engine has ended before the batch was done.")
            await asyncio.sleep(RETRY_S)
