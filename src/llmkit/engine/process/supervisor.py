"""Keeps an engine process running, for whoever wants to use it from any thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from llmkit.engine.process import messages
from llmkit.engine.process.engine_process import Launch
from llmkit.engine.process.messages import EngineSummary, Progress
from llmkit.engine.process.supervision import Supervision
from llmkit.engine.process.wake import Wake
from llmkit.errors import EngineClosedError, EngineError, renewed
from llmkit.requests.message import EngineOutput, EngineRequest

if TYPE_CHECKING:
    from llmkit.config.sections import ProcessConfig
    from llmkit.execution.setup import LoadProgress


class Supervisor:
    """Owns one engine process at a time, in a thread of its own. All methods may be called from any thread and, but for
    `start` and `close`, never wait.

    deliver: takes outputs, in order; died: told once that the engine is gone for good. Both are called in the
    supervisor's thread and must not wait.
    """

    def __init__(
        self,
        launch: Launch,
        settings: ProcessConfig,
        deliver: Callable[[list[EngineOutput]], None],
        died: Callable[[Exception], None],
    ) -> None:
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = Wake()
        self._work = Supervision(launch, settings, deliver, died, self._wake, self._commands)
        self._thread = threading.Thread(target=self._work.run, name="llmkit-engine-supervisor", daemon=True)

    def start(self, progress: LoadProgress | None = None) -> Any:
        """Start the first process and wait until it serves. Returns what the engine says about itself.

        progress: called in this thread. Raises the error that has kept the engine from starting.
        """
        self._thread.start()
        try:
            while isinstance(event := self._work.started.get(), Progress):
                if progress is not None:
                    progress(event.done, event.total)
        except BaseException:
            self.close()
            raise
        if isinstance(event, Exception):
            self.close()
            raise event
        return event

    def add(self, requests: Iterable[EngineRequest]) -> None:
        """Take requests over. A refusal comes as outputs. Raises EngineDeadError, EngineClosedError."""
        taken = list(requests)
        self._post(lambda: self._work.add(taken))

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests. Unknown ones are ignored, and so are all once the engine is gone."""
        ids = list(request_ids)
        self._post_unless_gone(lambda: self._work.abort(ids))

    def abort_sequences(self, sequences: Iterable[tuple[str, int]]) -> None:
        """End single sequences, (request id, index); else as `abort`."""
        pairs = list(sequences)
        self._post_unless_gone(lambda: self._work.abort_sequences(pairs))

    def call(self, method: str, arguments: tuple[Any, ...]) -> Future[Any]:
        """Run a utility in the engine process. While it is being restarted the call waits for the new one."""
        self._check()
        data = messages.dumped(arguments)
        future: Future[Any] = Future()
        self._post(lambda: self._work.call(method, data, future))
        return future

    @property
    def state(self) -> str:
        """See `Supervision`."""
        return self._work.state

    @property
    def error(self) -> Exception | None:
        """Why it is dead, once it is."""
        return self._work.error

    @property
    def info(self) -> Any:
        """What the engine has said about itself when it was ready."""
        return self._work.info

    @property
    def summary(self) -> EngineSummary | None:
        """The engine after its last step."""
        return self._work.summary

    @property
    def num_restarts(self) -> int:
        return self._work.restarts.count

    @property
    def stuck_s(self) -> float:
        """Seconds without a finished step while there is work; else 0."""
        return monotonic() - self._work.watch.progressed if len(self._work.journal) else 0.0

    def pid(self) -> int | None:
        """Of the engine process, while there is one."""
        process = self._work.process
        return None if process is None or process.ended else process.pid

    def close(self) -> None:
        """End the process and the thread, and wait for them. May be called twice."""
        if self._thread.is_alive():
            self._commands.append(self._work.close)
            self._wake.set()
            self._thread.join()

    def _check(self) -> None:
        if self._work.state == "dead" and isinstance(self._work.error, EngineError):
            raise renewed(self._work.error)
        if self._work.state == "closed":
            raise EngineClosedError("the engine has been closed.")

    def _post(self, command: Callable[[], None]) -> None:
        self._check()
        self._commands.append(command)
        self._wake.set()

    def _post_unless_gone(self, command: Callable[[], None]) -> None:
        """Whoever ends a request may not have heard yet that the engine is gone: nothing is left to be ended."""
        with suppress(EngineError):
            self._post(command)
