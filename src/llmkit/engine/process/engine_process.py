"""One life of the engine process, as its parent sees it: started, spoken to, watched, ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO, cast

import zmq

from llmkit.engine.process import messages
from llmkit.engine.process.boot import CODE, Boot, write_boot
from llmkit.engine.process.messages import FromChild, Heartbeat, Hello, ToChild
from llmkit.engine.process.plan_record import new_record_file, read_record
from llmkit.errors import EngineError
from llmkit.logs import LogFormat, passed_on

LONGEST_SOCKET_PATH = 100
"""Characters of the path of a Unix socket; the system's limit is 103 to 107."""

TAIL_LINES = 12
"""Last lines of the process's log that are told when it dies without a word."""

MAX_LINE = 4096


def socket_folder() -> str:
    """A new private folder (mode 0700) for sockets, short enough for their paths."""
    folder = tempfile.mkdtemp(prefix="llmkit-")
    if len(folder) + len("/outbox") > LONGEST_SOCKET_PATH:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="llmkit-", dir="/tmp")
    return folder


@dataclass(frozen=True)
class Launch:
    """What every engine process of one supervisor is started with. payload: the pickled builder, see `boot.Builder`.
    log_level, main_path, log_format: see `boot.Boot`.
    """

    payload: bytes
    log_level: str = "warning"
    main_path: str | None = None
    log_format: LogFormat = "text"


class EngineProcess:
    """Started by the constructor. Used by one thread, which owns the sockets; `woken` is called from other threads.

    woken: the process has ended. heartbeat_s: seconds between its heartbeats.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        launch: Launch,
        woken: Callable[[], None],
        heartbeat_s: float,
    ) -> None:
        self._folder: str | None = socket_folder()
        self._record_fd = new_record_file()
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._woken = woken
        self._ended = threading.Event()
        self._signs: set[type] = set()
        self.num_sent = 0
        inbox, outbox = f"ipc://{self._folder}/inbox", f"ipc://{self._folder}/outbox"
        self.socket = _bound(context, zmq.PULL, outbox)
        self._to_child = _bound(context, zmq.PUSH, inbox)
        boot = Boot(
            inbox,
            outbox,
            self._folder,
            os.getpid(),
            self._record_fd,
            heartbeat_s,
            launch.log_level,
            launch.main_path,
            launch.log_format,
        )
        self._log_format = launch.log_format
        try:
            self._process = _spawn(self._record_fd)
        except BaseException:
            self._release()
            raise
        self._threads = [
            threading.Thread(target=target, name=f"llmkit-engine-{name}", daemon=True)
            for name, target in (("log", self._read_log), ("end", self._await_end))
        ]
        for thread in self._threads:
            thread.start()
        with suppress(BrokenPipeError):  # it has died already, which is noticed below
            write_boot(cast("BinaryIO", self._process.stdin), boot, launch.payload)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._ended.is_set()

    def heard(self, message: Hello | Heartbeat) -> None:
        """A sign of one of the two sockets that the process sends by. Once it has all its connections, the folder can
        go, and with it all that could be left behind; before that, one that is still to be made would never be."""
        self._signs.add(type(message))
        if self._folder is not None and len(self._signs) == 2 and self._to_child.poll(0, zmq.POLLOUT):
            self._remove_folder()

    def _remove_folder(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def send(self, message: ToChild) -> int:
        """Number of this message among those to the process. What is sent to a dead process is lost.
        Raises what the encoder raises, TypeError and ValueError; nothing was sent then."""
        data = messages.encode(message)
        self.num_sent += 1
        # Its queue has no limit: it is not ready only before the process has connected, and after its death.
        while not self._to_child.poll(50, zmq.POLLOUT):
            if self.ended:
                return self.num_sent
        with suppress(zmq.Again):
            self._to_child.send(data, zmq.NOBLOCK)
        return self.num_sent

    def received(self) -> Iterator[FromChild]:
        """The messages that have arrived."""
        while True:
            try:
                yield messages.decode_from_child(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return

    def running_requests(self) -> list[str]:
        """Ids of the requests that were part of the steps under way when it died."""
        return read_record(self._record_fd)

    def kill(self) -> None:
        """End it at once."""
        with suppress(ProcessLookupError):
            self._process.kill()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until it is gone, at most so long; whether it is."""
        return self._ended.wait(timeout_s)

    def end_words(self) -> str:
        """How it has ended: "was killed by signal 9 (SIGKILL)", "ended with status 1"."""
        status = self._process.returncode
        if status is None:
            return "does not answer"
        if status >= 0:
            return f"ended with status {status}"
        try:
            name = f" ({signal.Signals(-status).name})"
        except ValueError:
            name = ""
        return f"was killed by signal {-status}{name}"

    def log_tail(self) -> str:
        """The last lines of its log, as they came."""
        return "\n".join(self._tail)

    def release(self) -> None:
        """Kill it if it still runs, and give back all that belongs to it. May be called twice."""
        self.kill()
        self.wait()
        for thread in self._threads:
            if thread.name.endswith("log"):
                thread.join(1.0)  # another process may hold the pipe open
        stdin = self._process.stdin
        if stdin is not None:
            with suppress(OSError):
                stdin.close()
        self._release()

    def _release(self) -> None:
        self._remove_folder()
        self.socket.close(linger=0)
        self._to_child.close(linger=0)
        if self._record_fd >= 0:
            os.close(self._record_fd)
            self._record_fd = -1

    def _await_end(self) -> None:
        self._process.wait()
        self._ended.set()
        self._woken()

    def _read_log(self) -> None:
        """Passes on what the process writes, line by line, so that people see whose words they are."""
        stream = cast("BinaryIO", self._process.stdout)
        with stream:
            for data in iter(lambda: stream.readline(MAX_LINE), b""):
                line = data.decode("utf-8", "replace").rstrip("\n")
                self._tail.append(line)
                with suppress(ValueError, OSError):  # nobody reads our log any more
                    print(passed_on(line, self._process.pid, self._log_format), file=sys.stderr, flush=True)


def _bound(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(endpoint)
    return socket


def _spawn(record_fd: int) -> subprocess.Popen[bytes]:
    """A new interpreter, in a group of processes of its own: signals of the terminal do not reach it."""
    path = json.dumps([os.path.abspath(entry) for entry in sys.path])
    try:
        return subprocess.Popen(
            [sys.executable, "-c", CODE, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(record_fd,),
            process_group=0,
        )
    except OSError as error:
        raise EngineError(f"The engine process could not be started: {error}.") from error
