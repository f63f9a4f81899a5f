"""What the supervisor's thread does: starts the engine process, passes messages, notices that it is dead or hung,
starts it again and takes its unfinished requests up where they were."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any

import zmq

from llmkit.engine.process import messages
from llmkit.engine.process.calls import Calls
from llmkit.engine.process.causes import blame, cause_of, given_up
from llmkit.engine.process.engine_process import EngineProcess, Launch
from llmkit.engine.process.journal import Entry, Journal
from llmkit.engine.process.messages import (
    Abort,
    AbortSequences,
    Add,
    EngineSummary,
    Failed,
    FromChild,
    Heartbeat,
    Hello,
    Outputs,
    Progress,
    Ready,
    Result,
    Stop,
)
from llmkit.engine.process.probe import Probe
from llmkit.engine.process.restarts import Restarts
from llmkit.engine.process.suspects import Suspects
from llmkit.engine.process.wake import Wake
from llmkit.engine.process.watch import Watch
from llmkit.errors import EngineClosedError, EngineDeadError, EngineError, described
from llmkit.requests.message import EngineOutput, EngineRequest, refusal_outputs

if TYPE_CHECKING:
    from llmkit.config.sections import ProcessConfig

logger = logging.getLogger("llmkit.engine.process")

LAST_WORDS_MS = 100
"""Longest that messages of a dead process are still waited for."""


class Supervision:
    """The work of a supervisor, all of it in the supervisor's thread, which is `run`.

    wake, commands: how other threads give it something to do. started: gets Progress, then what the first engine says
    about itself, or the error that has kept it from starting. The attributes may be read from any thread. state:
    "starting", "running", "waiting" (to be started again), "dead", "closed".
    """

    def __init__(
        self,
        launch: Launch,
        settings: ProcessConfig,
        deliver: Callable[[list[EngineOutput]], None],
        died: Callable[[Exception], None],
        wake: Wake,
        commands: deque[Callable[[], None]],
    ) -> None:
        self._launch = launch
        self._settings = settings
        self._deliver = deliver
        self._died = died
        self.journal = Journal()
        self._suspects = Suspects(self.journal)
        self._probe = Probe()
        self.restarts = Restarts(settings.max_restarts, settings.restart_window_s)
        self._calls = Calls()
        self._commands = commands
        self.started: SimpleQueue[Progress | Exception | Any] = SimpleQueue()
        self._wake = wake
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.process: EngineProcess | None = None
        self._cause: Exception | None = None
        self._start_at = 0.0
        self._ever_ready = False
        self.state = "starting"
        self.error: Exception | None = None
        self.info: Any = None
        self.summary: EngineSummary | None = None
        self.watch = self._new_watch()

    def run(self) -> None:
        try:
            self._start_process()
            while self.state != "closed":
                self._turn()
        except BaseException as error:
            logger.exception("the supervisor of the engine process has failed")
            self._die(EngineDeadError(f"The supervisor of the engine process has failed: {described(error)}."))
        finally:
            if self.process is not None:
                self.process.release()
            self._calls.fail_all(self.error or EngineClosedError("the engine has been closed."))
            self._context.term()

    def _turn(self) -> None:
        """Wait for the next event and see to everything that has come."""
        begun, timeout_s = monotonic(), self._timeout_s()
        poller = zmq.Poller()
        poller.register(self._wake.fileno(), zmq.POLLIN)
        process = self.process
        if process is not None:
            poller.register(process.socket, zmq.POLLIN)
        poller.poll(None if timeout_s is None else int(1000 * timeout_s) + 1)
        if timeout_s is not None and monotonic() - begun > timeout_s + 1.0:
            self.watch.heard = monotonic()  # this process was stopped itself: what the other one said is on its way
        self._wake.clear()
        while self._commands:
            self._commands.popleft()()
        if process is not None and process is self.process:
            self._listen(process)
            self._look_after(process)
        elif self.state == "waiting" and monotonic() >= self._start_at:
            self._start_process()

    def _timeout_s(self) -> float | None:
        if self.state == "waiting":
            return max(0.0, self._start_at - monotonic())
        settings = self._settings
        often = min(settings.heartbeat_s, settings.heartbeat_timeout_s / 4, settings.hang_timeout_s / 4)
        return None if self.process is None else often

    def _start_process(self) -> None:
        self.state = "starting"
        self._cause = None
        self.watch = self._new_watch()
        try:
            self.process = EngineProcess(self._context, self._launch, self._wake.set, self._settings.heartbeat_s)
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
                process.heard(message)
            case Result(number, value, failed):
                self._calls.answer(number, value, failed=failed)
            case Hello():
                process.heard(message)
            case Progress():
                if not self._ever_ready:
                    self.started.put(message)
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
            self.started.put(info)
        else:
            logger.warning("the engine process runs again; %d requests go on", len(self.journal))
            self._calls.process_started()
        self._send_calls()
        if self._probe.due:
            process = self.process
            assert process is not None
            process.send(Add([self._probe.sent()]))
        self._admit()

    def _take_outputs(self, message: Outputs) -> None:
        if message.summary is not None:
            self.summary = message.summary
        if self._probe.running and self._probe.answered(message.outputs):
            self._admit()
        passed = self.journal.note(message.outputs, message.seen)
        if passed:
            self._deliver(passed)
            if self._suspects.any_on_trial:
                self._admit()

    def _admit(self) -> None:
        """Send what may be computed now and has not been sent."""
        if self.state == "running" and not self._probe.running:
            self._send(self._suspects.admitted())

    def _send(self, entries: list[Entry]) -> None:
        """One message, so that the engine's next step can have all of them."""
        if not entries:
            return
        assert self.process is not None
        try:
            number = self.process.send(Add([entry.resumption() for entry in entries]))
        except (TypeError, ValueError, OverflowError) as error:
            # extra_args may hold anything.
            if len(entries) == 1:
                self._refuse_unsendable(entries[0], error)
            else:
                for entry in entries:
                    self._send([entry])
        else:
            for entry in entries:
                entry.sent = number

    def _refuse_unsendable(self, entry: Entry, error: Exception) -> None:
        self.journal.remove(entry.request_id)
        message = f"The request cannot be sent to the engine process: {described(error)}."
        self._deliver(refusal_outputs(entry.request, message, "extra_args"))

    # Commands

    def add(self, requests: list[EngineRequest]) -> None:
        if not len(self.journal):
            self.watch.pending_since(monotonic())
        entries: list[Entry] = []
        for request in requests:
            entry = self.journal.add(request)
            if entry is None:
                message = f"A request with id {request.request_id[:80]!r} is already being served."
                self._deliver(refusal_outputs(request, message, "request_id"))
            else:
                entries.append(entry)
        if self._suspects.any_on_trial or self._probe.running:
            self._admit()
        elif self.state == "running":
            self._send(entries)

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.journal.remove(request_id)
        if self.state == "running" and self.process is not None:
            self.process.send(Abort(request_ids))
            self._admit_after_end()

    def abort_sequences(self, sequences: list[tuple[str, int]]) -> None:
        for request_id, index in sequences:
            self.journal.end_sequence(request_id, index)
        if self.state == "running" and self.process is not None:
            self.process.send(AbortSequences(sequences))
            self._admit_after_end()

    def _admit_after_end(self) -> None:
        if self._suspects.any_on_trial:
            self._admit()

    def call(self, method: str, arguments: bytes, future: Future[Any]) -> None:
        self._calls.add(method, arguments, future)
        if self.error is not None:
            self._calls.fail_all(self.error)
        self._send_calls()

    def _send_calls(self) -> None:
        if self.state == "running" and self.process is not None:
            for call in self._calls.take_unsent():
                self.process.send(call)

    def close(self) -> None:
        process = self.process
        if process is not None:
            if self.state == "running":
                process.send(Stop())
                process.wait(self._settings.stop_timeout_s)
            process.release()
            self.process = None
        self.state = "closed"

    # Faults

    def _look_after(self, process: EngineProcess) -> None:
        """Notice that the process is dead, or must be taken for hung."""
        now = monotonic()
        if process.ended:
            while process.socket.poll(LAST_WORDS_MS):
                self._listen(process)
            self._crashed(process.end_words(), process.running_requests())
        elif self.state == "starting" or len(self.journal) or self._calls.any_sent or self._probe.running:
            problem = self.watch.problem(now)
            if problem is not None:
                process.kill()
                process.wait()
                self._crashed(f"{problem} and was killed", process.running_requests())

    def _crashed(self, words: str, running: Iterable[str]) -> None:
        """The process is gone: start it again, or give up."""
        process, self.process = self.process, None
        tail = ""
        if process is not None:
            process.release()
            tail = process.log_tail()
        cause = self._cause or cause_of(words, tail, starting=self.state == "starting")
        if not self._ever_ready:
            self._die(cause)
            return
        self._calls.process_died(cause)
        suspects = self._suspects_among(running)
        self.restarts.crashed(monotonic(), suspects)
        failures = self._condemn(words, self._suspects.crashed(suspects))
        if self.restarts.take_riddle():
            self._suspects.suspect_all_sent()
        for entry in self.journal:
            entry.resumed = entry.resumed or entry.sent is not None
            entry.sent = None
        delay = self.restarts.next_delay()
        if delay is not None:
            logger.error("the engine process %s; it is started again in %.1f s", words, delay)
            self.state = "waiting"
            self._start_at = monotonic() + delay
        if failures:
            self._deliver(failures)
        if delay is None:
            self._die(given_up(cause, self.restarts.num_unprovoked, self._settings.restart_window_s))

    def _suspects_among(self, running: Iterable[str]) -> list[str]:
        """The requests that can have caused a crash: those of the steps under way, or, if there were none, all that
        the process had."""
        if self._probe.running:
            self._probe.crashed()
            return []
        return list(running) or [entry.request_id for entry in self.journal if entry.sent is not None]

    def _condemn(self, words: str, guilty: Entry | None) -> list[EngineOutput]:
        """The end of the request that is found guilty of the crash, if one is."""
        if guilty is None:
            return []
        message = blame(words)
        logger.error("request %s: %s", guilty.request_id, message)
        others_went_on = self._suspects.others_went_on(guilty)
        self._probe.due = self._probe.due or not others_went_on
        self.restarts.explained(guilty.request_id, wholly=others_went_on)
        self.journal.remove(guilty.request_id)
        return guilty.failure(message)

    def _die(self, error: Exception) -> None:
        """Gone for good."""
        self.error = error
        self.state = "dead"
        self.started.put(error)
        self._calls.fail_all(error)
        self._died(error)
