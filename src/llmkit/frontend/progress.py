"""The progress bar of a batch of requests."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from llmkit.requests.output import RequestOutput

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class RequestProgress:
    """A bar on standard error, with the rate of generated tokens. `show`: None for "on a terminal, if there are
    several requests"."""

    def __init__(self, total: int, show: bool | None) -> None:
        self._total = total
        self._show = (total > 1 and sys.stderr.isatty()) if show is None else show
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._tokens = 0
        self._start = time.monotonic()

    def __enter__(self) -> RequestProgress:
        if self._show:
            # Rich is imported only by those who see it.
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]:.0f} tokens/s"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._progress.start()
            self._task = self._progress.add_task("Requests", total=self._total, rate=0.0)
        return self

    def finished(self, output: RequestOutput) -> None:
        """One request has ended."""
        if self._progress is None or self._task is None:
            return
        self._tokens += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed = max(time.monotonic() - self._start, 1e-9)
        self._progress.update(self._task, advance=1, rate=self._tokens / elapsed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
