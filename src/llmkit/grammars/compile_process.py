"""The engine's end of the compile process: starts it, sends grammars, hands on outcomes, ends it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from time import monotonic
from typing import BinaryIO, cast

from llmkit.errors import described
from llmkit.grammars import compile_messages as messages
from llmkit.grammars.compile_messages import Begun, Cancel, Compile, Hello, Outcome

logger = logging.getLogger("llmkit.grammars")

START_S = 120.0
"""Longest silence of a process that has something to do, beyond the time limit of a grammar: it may be importing."""

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from llmkit.grammars.compile_server import main; main()"
)
_ONE_THREAD = {
    # A process that forks has to have one thread; and one that compiles needs no more.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Arenas of the allocator reserve address space by the thread, which would count against the memory limit.
    "MALLOC_ARENA_MAX": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONWARNINGS": "ignore",
}


class CompileProcess:
    """Started with the first grammar, and again after it has died. `send` and `cancel` come from any thread and never
    wait; `on_outcome` is called in a thread of this object, with an Outcome for every number sent and not cancelled;
    before it `on_begun`, with the number of a grammar that waits no longer."""

    def __init__(
        self, hello: Callable[[], Hello], on_begun: Callable[[int], None], on_outcome: Callable[[Outcome], None]
    ) -> None:
        self._make_hello = hello
        self._on_begun = on_begun
        self._on_outcome = on_outcome
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._to_send: list[Compile | Cancel] = []
        self._pending: dict[int, subprocess.Popen[bytes] | None] = {}  # the process it was sent to
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._last_sign = 0.0
        self._threads: list[threading.Thread] = []

    @property
    def pid(self) -> int | None:
        """Of the process, while it runs."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def send(self, task: Compile) -> None:
        """Compile a grammar, as soon as there is room."""
        with self._lock:
            if not self._pending:
                self._last_sign = monotonic()
            self._pending[task.number] = None
            self._to_send.append(task)
            self._changed.notify_all()
            if not self._threads:
                self._start_thread("llmkit-grammar-sender", self._serve)

    def cancel(self, number: int) -> None:
        """Nobody wants it any more: what has been done for it is thrown away, and its child killed."""
        with self._lock:
            if self._pending.pop(number, None) is not None:
                self._to_send.append(Cancel(number))
                self._changed.notify_all()

    def close(self) -> None:
        """End the process and the threads. May be called twice."""
        with self._lock:
            self._closed = True
            self._pending.clear()
            self._changed.notify_all()
            process, threads = self._process, self._threads
        if process is not None:
            _kill_with_children(process)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _start_thread(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        """Sends what there is to send; starts the process when there is something and none runs."""
        while True:
            with self._lock:
                while not self._to_send and not self._closed:
                    self._changed.wait(self._seconds_left())
                    if self._is_silent():
                        self._kill_silent()
                if self._closed:
                    return
                to_send, self._to_send = self._to_send, []
            self._send_all(to_send)

    def _send_all(self, to_send: list[Compile | Cancel]) -> None:
        numbers = [message.number for message in to_send if isinstance(message, Compile)]
        try:
            process = self._running()
            with self._lock:
                for number in numbers:
                    if number in self._pending:
                        self._pending[number] = process
            for message in to_send:
                messages.write(cast("BinaryIO", process.stdin), message)
        except (
            OSError,
            ValueError,
        ) as error:  # ValueError: whoever listens to it has found it dead and closed the pipe
            logger.warning("the compile process cannot be reached: %s", error)
            self._fail(numbers, "The process that compiles grammars could not be started or has died.")
        except BaseException as error:  # the vocabulary or a plugin cannot be sent: then nobody may wait for ever
            logger.warning("the compile process cannot be started", exc_info=error)
            self._fail(numbers, f"The process that compiles grammars could not be started: {described(error)}")

    def _running(self) -> subprocess.Popen[bytes]:
        process = self._process
        if process is not None and process.poll() is None:
            return process
        environment: Mapping[str, str] = {**os.environ, **_ONE_THREAD}
        path = [os.path.abspath(entry) for entry in sys.path]
        opening = messages.packed(path) + messages.packed(self._make_hello())
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            # No session of its own: where the system shares out processors by session, its niceness would say nothing.
            process_group=0,
        )
        with self._lock:
            self._process = process
            if self._closed:
                _kill_with_children(process)
            self._start_thread("llmkit-grammar-receiver", lambda: self._receive(process))
        stdin = cast("BinaryIO", process.stdin)
        stdin.write(opening)
        stdin.flush()
        return process

    def _receive(self, process: subprocess.Popen[bytes]) -> None:
        """Hands on what one process answers, until it is gone."""
        stream = cast("BinaryIO", process.stdout)
        try:
            while True:
                message = messages.read(stream)
                with self._lock:
                    self._last_sign = monotonic()
                    wanted = isinstance(message, Outcome) and self._pending.pop(message.number, None) is not None
                if wanted:
                    self._on_outcome(message)
                elif isinstance(message, Begun):
                    self._on_begun(message.number)
        except (EOFError, OSError, ValueError):  # ValueError: closed by this side
            pass
        except Exception as error:  # what cannot be unpickled, most of all
            logger.warning("the compile process says what nobody understands and is ended", exc_info=error)
        with self._lock:
            if self._process is process:
                self._process = None  # what comes from now on goes to the next one
        _kill_with_children(process)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                _close(pipe)
        with self._lock:
            lost = [number for number, sent_to in self._pending.items() if sent_to is process]
        if not self._closed:
            self._fail(lost, "The process that compiles grammars has died.")

    def _fail(self, numbers: list[int], message: str) -> None:
        """These have failed, unless somebody has taken them back or told of them already."""
        with self._lock:
            numbers = [number for number in numbers if number in self._pending]
            for number in numbers:
                del self._pending[number]
        for number in numbers:
            self._on_outcome(Outcome(number, "crashed", message=message))

    def _seconds_left(self) -> float | None:
        return None if not self._pending else max(0.1, self._last_sign + START_S - monotonic())

    def _is_silent(self) -> bool:
        return bool(self._pending) and monotonic() - self._last_sign > START_S

    def _kill_silent(self) -> None:
        logger.warning("the compile process has said nothing for %.0f s and is ended", START_S)
        self._last_sign = monotonic()
        if self._process is not None:
            _kill_with_children(self._process)


def _kill_with_children(process: subprocess.Popen[bytes]) -> None:
    """They are one group of processes."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # all of them are gone
        os.killpg(process.pid, signal.SIGKILL)


def _close(pipe: object) -> None:
    with contextlib.suppress(OSError):  # what could not be written to the dead process
        pipe.close()  # type: ignore[attr-defined]
