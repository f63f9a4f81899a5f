"""Keeps an engine process running: starts it, passes messages, notices that it is dead or hung, starts it again and
takes its unfinished requests up where they were."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any

import zmq

from llmkit.engine.process import messages
from llmkit.engine.process.calls import Calls
from llmkit.engine.process.engine_process import EngineProcess
from llmkit.engine.process.journal import Entry, Journal
from llmkit.engine.process.messages import (
    Abort,
    AbortSequences,
    Add,
    Failed,
    FromChild,
    Heartbeat,
    Hello,
    Outputs,
    Progress,
    Ready,
    Result,
    StepSummary,
    Stop,
)
from llmkit.engine.process.restarts import Restarts
from llmkit.engine.process.suspects import Suspects
from llmkit.engine.process.wake import Wake
from llmkit.engine.process.watch import Watch
from llmkit.errors import EngineClosedError, EngineDeadError, EngineError, described, renewed
from llmkit.requests.message import EngineOutput, EngineRequest, refusal_outputs

if TYPE_CHECKING:
    from llmkit.config.sections import ProcessConfig
    from llmkit.execution.setup import LoadProgress

logger = logging.getLogger("llmkit.engine.process")

LAST_WORDS_MS = 100
"""Longest that messages of a dead process are still waited for."""


@dataclass(frozen=True)
class Launch:
    """What every engine process of one supervisor is started with. payload: the pickled builder."""

    payload: bytes
    log_level: str = "warning"
    main_path: str | None = None


class Supervisor:
    """Owns one engine process at a time, in a thread of its own. All methods may be called from any thread and, but for
    `start` and `close`, never wait.

    deliver: takes outputs, in order; died: told once that the engine is gone for good. Both are called in the
    supervisor's thread and must not wait. state: "starting", "running", "waiting" (to be started again), "dead",
    "closed".
    """

    def __init__(
        self,
        launch: Launch,
        settings: ProcessConfig,
        deliver: Callable[[list[EngineOutput]], None],
        died: Callable[[Exception], None],
    ) -> None:
        self._launch = launch
        self._settings = settings
        self._deliver = deliver
        self._died = died
        self._journal = Journal()
        self._suspects = Suspects(self._journal)
        self._restarts = Restarts(settings.max_restarts, settings.restart_window_s)
        self._calls = Calls()
        self._commands: deque[Callable[[], None]] = deque()
        self._started: SimpleQueue[Progress | Exception | Any] = SimpleQueue()
        self._wake = Wake()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._process: EngineProcess | None = None
        self._cause: Exception | None = None
        self._start_at = 0.0
        self._ever_ready = False
        self.state = "starting"
        self.error: Exception | None = None
        self.info: Any = None
        self.summary: StepSummary | None = None
        self.watch = self._new_watch()
        self._thread = threading.Thread(target=self._run, name="llmkit-engine-supervisor", daemon=True)

    # For other threads

    def start(self, progress: LoadProgress | None = None) -> Any:
        """Start the first process and wait until it serves. Returns what the engine says about itself.

        progress: called in this thread. Raises the error that has kept the engine from starting.
        """
        self._thread.start()
        try:
            while isinstance(event := self._started.get(), Progress):
                if progress is not None:
                    progress(event.done, event.total)
        except BaseException:
            self.close()
            raise
        if isinstance(event, Exception):
            self.close()
            raise event
        return event

    def add(self, request: EngineRequest) -> None:
        """Take a request over. A refusal comes as outputs. Raises EngineDeadError, EngineClosedError."""
        self._post(lambda: self._add(request))

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests. Unknown ones are ignored."""
        ids = list(request_ids)
        self._post(lambda: self._abort(ids))

    def abort_sequences(self, sequences: Iterable[tuple[str, int]]) -> None:
        """End single sequences, (request id, index)."""
        pairs = list(sequences)
        self._post(lambda: self._abort_sequences(pairs))

    def call(self, method: str, arguments: tuple[Any, ...]) -> Future[Any]:
        """Run a utility in the engine process. While it is being restarted the call waits for the new one."""
        self._check()
        data = messages.dumped(arguments)
        future: Future[Any] = Future()
        self._post(lambda: self._call(method, data, future))
        return future

    @property
    def num_restarts(self) -> int:
        return self._restarts.count

    @property
    def stuck_s(self) -> float:
        """Seconds without a finished step while there is work; else 0."""
        return monotonic() - self.watch.progressed if len(self._journal) else 0.0

    def pid(self) -> int | None:
        """Of the engine process, while there is one."""
        process = self._process
        return None if process is None or process.ended else process.pid

    def close(self) -> None:
        """End the process and the thread, and wait for them. May be called twice."""
        if self._thread.is_alive():
            self._commands.append(self._close)
            self._wake.set()
            self._thread.join()

    def _check(self) -> None:
        if self.state == "dead" and isinstance(self.error, EngineError):
            raise renewed(self.error)
        if self.state == "closed":
            raise EngineClosedError("the engine has been closed.")

    def _post(self, command: Callable[[], None]) -> None:
        self._check()
        self._commands.append(command)
        self._wake.set()

    # The thread

    def _run(self) -> None:
        try:
            self._start_process()
            while self.state != "closed":
                self._turn()
        except BaseException as error:
            logger.exception("the supervisor of the engine process has failed")
            self._die(EngineDeadError(f"The supervisor of the engine process has failed: {described(error)}."))
        finally:
            if self._process is not None:
                self._process.release()
            self._calls.fail_all(self.error or EngineClosedError("the engine has been closed."))
            self._context.term()

    def _turn(self) -> None:
        """Wait for the next event and see to everything that has come."""
        begun, timeout_s = monotonic(), self._timeout_s()
        poller = zmq.Poller()
        poller.register(self._wake.fileno(), zmq.POLLIN)
        process = self._process
        if process is not None:
            poller.register(process.socket, zmq.POLLIN)
        poller.poll(None if timeout_s is None else int(1000 * timeout_s) + 1)
        if timeout_s is not None and monotonic() - begun > timeout_s + 1.0:
            self.watch.heard = monotonic()  # this process was stopped itself: what the other one said is on its way
        self._wake.clear()
        while self._commands:
            self._commands.popleft()()
        if process is not None and process is self._process:
            self._listen(process)
            self._look_after(process)
        elif self.state == "waiting" and monotonic() >= self._start_at:
            self._start_process()

    def _timeout_s(self) -> float | None:
        if self.state == "waiting":
            return max(0.0, self._start_at - monotonic())
        settings = self._settings
        often = min(settings.heartbeat_s, settings.heartbeat_timeout_s / 4, settings.hang_timeout_s / 4)
        return None if self._process is None else often

    def _start_process(self) -> None:
        self.state = "starting"
        self._cause = None
        self.watch = self._new_watch()
        launch = self._launch
        try:
            self._process = EngineProcess(
                self._context,
                launch.payload,
                self._wake.set,
                heartbeat_s=self._settings.heartbeat_s,
                log_level=launch.log_level,
                main_path=launch.main_path,
            )
        except (OSError, EngineError, zmq.ZMQError) as error:
            self._cause = EngineError(f"The engine process could not be started: {described(error)}.")
            self._crashed("could not be started", ())

    def _new_watch(self) -> Watch:
        settings, now = self._settings, monotonic()
        before = getattr(self, "watch", None)
        progressed = now if before is None else before.progressed
        return Watch(settings.heartbeat_timeout_s, settings.hang_timeout_s, now, progressed=progressed)

    def _listen(self, process: EngineProcess) -> None:
        for message in process.received():
            self._take(process, message)

    def _take(self, process: EngineProcess, message: FromChild) -> None:
        now = monotonic()
        match message:
            case Outputs():
                self.watch.sign(now)
                self._take_outputs(message)
            case Heartbeat():
                self.watch.heartbeat(message, now)
            case Result(number, value, failed):
                self._calls.answer(number, value, failed=failed)
            case Hello():
                process.connected()
            case Progress():
                if not self._ever_ready:
                    self._started.put(message)
            case Ready(about):
                self._ready(messages.loaded(about))
            case Failed(error):
                self._cause = messages.loaded_error(error)

    def _ready(self, info: Any) -> None:
        self.info = info
        self.state = "running"
        self.watch.sign(monotonic())
        if not self._ever_ready:
            self._ever_ready = True
            self._started.put(info)
        else:
            logger.warning("the engine process runs again; %d requests go on", len(self._journal))
        self._admit()
        self._send_calls()

    def _take_outputs(self, message: Outputs) -> None:
        if message.summary is not None:
            self.summary = message.summary
        passed = self._journal.note(message.outputs, message.seen)
        if passed:
            self._deliver(passed)
            if self._suspects.any_on_trial:
                self._admit()

    def _admit(self) -> None:
        """Send what may be computed now and has not been sent."""
        if self.state == "running":
            for entry in self._suspects.admitted():
                self._send(entry)

    def _send(self, entry: Entry) -> None:
        assert self._process is not None
        try:
            entry.sent = self._process.send(Add(entry.resumption()))
        except (TypeError, ValueError, OverflowError) as error:
            # extra_args and kv_transfer_params may hold anything.
            self._journal.remove(entry.request_id)
            message = f"The request cannot be sent to the engine process: {described(error)}."
            self._deliver(refusal_outputs(entry.request, message, "extra_args"))

    # Commands, in the thread

    def _add(self, request: EngineRequest) -> None:
        if not len(self._journal):
            self.watch.pending_since(monotonic())
        entry = self._journal.add(request)
        if entry is None:
            message = f"A request with id {request.request_id[:80]!r} is already being served."
            self._deliver(refusal_outputs(request, message, "request_id"))
        elif self.state == "running":
            self._send(entry)

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._journal.remove(request_id)
        if self.state == "running" and self._process is not None:
            self._process.send(Abort(request_ids))
            self._admit_after_end()

    def _abort_sequences(self, sequences: list[tuple[str, int]]) -> None:
        for request_id, index in sequences:
            self._journal.end_sequence(request_id, index)
        if self.state == "running" and self._process is not None:
            self._process.send(AbortSequences(sequences))
            self._admit_after_end()

    def _admit_after_end(self) -> None:
        if self._suspects.any_on_trial:
            self._admit()

    def _call(self, method: str, arguments: bytes, future: Future[Any]) -> None:
        self._calls.add(method, arguments, future)
        if self.error is not None:
            self._calls.fail_all(self.error)
        self._send_calls()

    def _send_calls(self) -> None:
        if self.state == "running" and self._process is not None:
            for call in self._calls.take_unsent():
                self._process.send(call)

    def _close(self) -> None:
        process = self._process
        if process is not None:
            if self.state == "running":
                process.send(Stop())
                process.wait(self._settings.stop_timeout_s)
            process.release()
            self._process = None
        self.state = "closed"

    # Faults

    def _look_after(self, process: EngineProcess) -> None:
        """Notice that the process is dead, or must be taken for hung."""
        now = monotonic()
        loading = self.state == "starting"
        if process.ended:
            while process.socket.poll(LAST_WORDS_MS):
                self._listen(process)
            self._crashed(process.end_words(), process.running_requests())
        elif loading or len(self._journal) or self._calls.any_sent:
            problem = self.watch.problem(now, loading=loading)
            if problem is not None:
                process.kill()
                process.wait()
                self._crashed(f"{problem} and was killed", process.running_requests())

    def _crashed(self, words: str, running: Iterable[str]) -> None:
        """The process is gone: start it again, or give up."""
        process, self._process = self._process, None
        tail = ""
        if process is not None:
            process.release()
            tail = process.log_tail()
        cause = self._cause_of(words, tail)
        if not self._ever_ready:
            self._die(cause)
            return
        self._calls.process_died(cause)
        failures = self._condemn(words, self._suspects.crashed(running))
        for entry in self._journal:
            entry.resumed = entry.resumed or entry.sent is not None
            entry.sent = None
        delay = self._restarts.crashed(monotonic())
        if delay is not None:
            logger.error("the engine process %s; it is started again in %.1f s", words, delay)
            self.state = "waiting"
            self._start_at = monotonic() + delay
        if failures:
            self._deliver(failures)
        if delay is None:
            self._die(self._given_up(cause))

    def _given_up(self, cause: Exception) -> EngineDeadError:
        recent, window = self._restarts.num_recent, self._settings.restart_window_s
        times = f"{recent} times in {window:g} s" if recent > 1 else "once"
        return EngineDeadError(
            f"The engine process has crashed {times} and is not started again. The last time: {cause}"
        )

    def _cause_of(self, words: str, tail: str) -> Exception:
        if self._cause is not None:
            return self._cause
        when = " while it was starting" if self.state == "starting" else ""
        log = f" The last lines of its log:\n{tail}" if tail else ""
        return EngineError(f"The engine process {words}{when}.{log}")

    def _condemn(self, words: str, guilty: Entry | None) -> list[EngineOutput]:
        """The end of the request that is found guilty of the crash, if one is."""
        if guilty is None:
            return []
        message = f"The engine process {words} again and again while it computed this request, which is given up."
        logger.error("request %s: %s", guilty.request_id, message)
        self._journal.remove(guilty.request_id)
        return guilty.failure(message)

    def _die(self, error: Exception) -> None:
        """Gone for good."""
        self.error = error
        self.state = "dead"
        self._started.put(error)
        self._calls.fail_all(error)
        self._died(error)
