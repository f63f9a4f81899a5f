"""The engine process: connects to its parent, builds the engine, runs the step loop, ends itself with the parent."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import sys
import threading
from time import monotonic
from typing import TYPE_CHECKING, Any, BinaryIO

import zmq

from llmkit.engine.collection import own_process
from llmkit.engine.process import messages
from llmkit.engine.process.boot import Boot, Builder, import_main, read_frame
from llmkit.engine.process.messages import Failed, FromChild, Hello, Progress, Ready
from llmkit.engine.process.pulse import HeartbeatThread, Pulse
from llmkit.logs import JsonFormatter, LogFormat, set_level
from llmkit.openmp import wait_briefly

if TYPE_CHECKING:
    from llmkit.engine.process.loop import EngineLoop

logger = logging.getLogger("llmkit.engine.process")

ORPHAN_GRACE_S = 5.0
"""Seconds that a process whose parent is gone has to close its engine before it is ended as it is."""

PROGRESS_INTERVAL_S = 0.1
LINGER_MS = 5000


def main() -> None:
    """Entry point of the process; `boot.CODE` calls it. Exit status 1: the engine could not be built or go on."""
    # The parent decides when to end: a Ctrl-C at the terminal, or a stop of the whole group of processes, must not
    # take the engine away from requests that the parent is still finishing.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait_briefly()
    own_process()
    stream = _own_stdin()
    boot: Boot = pickle.loads(read_frame(stream))
    _log_to_stderr(boot.log_level, boot.log_format)
    process = EngineChild(boot, stream)
    status = process.run()
    from llmkit.scheduling.mask_threads import any_at_work  # the engine has imported it; the boot must be quick

    if any_at_work():
        logging.shutdown()
        os._exit(status)
    sys.exit(status)


def _own_stdin() -> BinaryIO:
    """The pipe from the parent, out of the way of whoever reads the standard input."""
    stream = os.fdopen(os.dup(0), "rb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return stream


def _log_to_stderr(level: str, log_format: LogFormat) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    if log_format == "json":
        logging.getLogger().handlers[0].setFormatter(JsonFormatter())
    set_level(level)
    logging.captureWarnings(True)


class EngineChild:
    """One life of the engine process."""

    def __init__(self, boot: Boot, stream: BinaryIO) -> None:
        self._boot = boot
        self._stream = stream
        self._pulse = Pulse()
        self._loop: EngineLoop | None = None
        self._engine: Any = None
        self._next_progress = 0.0
        self._orphan = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = self._socket(zmq.PULL, boot.inbox)
        self._outbox = self._socket(zmq.PUSH, boot.outbox)
        self._heart = HeartbeatThread(
            self._context, boot.outbox, self._pulse, boot.heartbeat_s, boot.parent_pid, self._orphaned
        )

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.connect(endpoint)
        return socket

    def run(self) -> int:
        """Build, serve, close. Returns the exit status."""
        self._send(Hello(os.getpid()))
        self._heart.start()
        try:
            payload = read_frame(self._stream)
            threading.Thread(target=self._watch_parent, name="llmkit-parent-watch", daemon=True).start()
            with self._pulse.doing("loading", bounded=False):
                self._build(payload)
            assert self._loop is not None
            self._loop.run()
        except EOFError:  # the parent was gone before it had said what to run
            self._remove_folder()
            return 1
        except BaseException as error:
            logger.error("the engine process ends", exc_info=error)
            self._send(Failed(messages.dumped_error(messages.start_failure(error) if self._loop is None else error)))
            return 1
        finally:
            with self._pulse.doing("closing"):
                self._close()
        return 0

    def _build(self, payload: bytes) -> None:
        if self._boot.main_path is not None:
            import_main(self._boot.main_path)
        build: Builder = pickle.loads(payload)
        engine = self._engine = build(self._progress)
        from llmkit.engine.process.loop import EngineLoop
        from llmkit.engine.process.plan_record import PlanRecorder

        recorder = PlanRecorder(self._boot.record_fd)
        self._loop = EngineLoop(engine, engine.run_utility, self._inbox, self._outbox, self._pulse, recorder)
        self._send(Ready(messages.dumped(engine.info())))

    def _progress(self, done: int, total: int | None) -> None:
        now = monotonic()
        if now >= self._next_progress or done == total:
            self._next_progress = now + PROGRESS_INTERVAL_S
            self._send(Progress(done, total))

    def _send(self, message: FromChild) -> None:
        self._outbox.send(messages.encode(message), zmq.NOBLOCK)

    def _close(self) -> None:
        try:
            if self._engine is not None:
                self._engine.close()
        except Exception:
            logger.exception("the engine could not be closed")
        self._heart.stop()
        self._inbox.close(linger=0)
        self._outbox.close(linger=0 if self._orphan else LINGER_MS)
        self._context.term()  # returns when everything has been sent, or after LINGER_MS

    def _watch_parent(self) -> None:
        """The parent never says more on this pipe, and never closes it while it lives."""
        while self._stream.read(1):
            pass
        self._orphaned()

    def _orphaned(self) -> None:
        """The parent is gone: end in good order if that is soon, else at once."""
        self._orphan = True
        self._remove_folder()
        if self._loop is not None:
            self._loop.stopping = True
        timer = threading.Timer(ORPHAN_GRACE_S, os._exit, (1,))
        timer.daemon = True
        timer.start()

    def _remove_folder(self) -> None:
        """Where the sockets are; usually the parent has removed it as soon as both ends were connected."""
        shutil.rmtree(self._boot.folder, ignore_errors=True)
