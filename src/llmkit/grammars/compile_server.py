"""The compile process: a small process with the grammar libraries loaded, which forks a child for every grammar.

A fork has the libraries and the vocabulary at hand in milliseconds, and can be killed in the middle of anything, which
no thread can. It must be forked from a process that has one thread only; the engine's own process, with torch's and
others', is none. This process does nothing else: it reads requests, forks, kills what takes too long, and passes on
results. It ends when its input does, and so never outlives the engine.
"""

from __future__ import annotations

import gc
import os
import pickle
import selectors
import signal
import sys
import tempfile
from collections import deque
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, BinaryIO, NoReturn

from llmkit.errors import described
from llmkit.grammars import compile_messages as messages
from llmkit.grammars.compile_child import run_child
from llmkit.grammars.compile_messages import Alive, Begun, Cancel, Compile, Hello, Outcome
from llmkit.hookspecs.structured import GrammarCompiler

MAX_RESULT_BYTES = 256 << 20
NICE_START = 5
CLOCK_RATIO = 3
"""The limit is one of processor time, of which children get little beside steps; by the clock it is so many times."""

_CHUNK = 1 << 20
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP)


@dataclass
class Child:
    """A grammar that is being compiled. errors: a file that its standard error goes to."""

    task: Compile
    pid: int
    deadline: float
    errors: Any
    data: bytearray = field(default_factory=bytearray)


class CompileServer:
    """Serves one engine over a pair of streams."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self._source = source
        self._sink = sink
        self._waiting: deque[Compile] = deque()
        self._waiting_again: deque[Compile] = deque()  # begun when nobody waits for a first try
        self._children: dict[int, Child] = {}  # by the descriptor that the child writes to
        self._compilers: dict[str, GrammarCompiler] = {}
        self._selector = selectors.DefaultSelector()
        self._hello: Hello = messages.read(source)

    def run(self) -> None:
        """Serve until the engine is gone."""
        self._selector.register(self._source, selectors.EVENT_READ)
        try:
            while True:
                self._start_children()
                for key, _ in self._selector.select(self._seconds_left()):
                    if key.fileobj is self._source:
                        self._take(messages.read(self._source))
                    elif key.fd in self._children:
                        self._receive(key.fd)
                self._stop_late_ones()
        except (EOFError, BrokenPipeError):
            pass
        finally:
            for fd in list(self._children):
                self._reap(fd, kill=True)

    def _take(self, message: Compile | Cancel) -> None:
        if isinstance(message, Compile):
            (self._waiting_again if message.again else self._waiting).append(message)
            return
        for queue in (self._waiting, self._waiting_again):
            for task in [task for task in queue if task.number == message.number]:
                queue.remove(task)
        for fd in [fd for fd, child in self._children.items() if child.task.number == message.number]:
            self._reap(fd, kill=True)

    def _start_children(self) -> None:
        while (queue := self._waiting or self._waiting_again) and len(self._children) < self._hello.max_children:
            task = queue.popleft()
            try:
                compiler = self._compiler(task.backend)
            except BaseException as error:
                self._tell(Outcome(task.number, "failed", message=described(error)))
                continue
            try:
                self._fork(task, compiler)
            except OSError as error:  # no process, no descriptor, no room for a file
                self._tell(Outcome(task.number, "failed", message=described(error)))

    def _compiler(self, choice: str) -> GrammarCompiler:
        known = self._compilers.get(choice)
        if known is None:
            self._tell(Alive())
            registry = self._hello.registry
            plugin = registry.load("structured", choice)
            known = registry.build(plugin, {"vocabulary": self._hello.vocabulary})
            assert isinstance(known, GrammarCompiler)
            known.warm_up()
            self._compilers[choice] = known
            gc.collect()
            gc.freeze()  # children then share the pages of what is there already
        return known

    def _fork(self, task: Compile, compiler: GrammarCompiler) -> None:
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the child is reaped
        read_fd, write_fd = os.pipe()
        try:
            pid = os.fork()
            if pid == 0:
                self._be_child(task, compiler, (read_fd, write_fd), errors.fileno())
        except OSError:
            os.close(read_fd)
            errors.close()
            raise
        finally:
            os.close(write_fd)
        os.set_blocking(read_fd, False)
        self._children[read_fd] = Child(task, pid, monotonic() + CLOCK_RATIO * self._hello.timeout_s, errors)
        self._selector.register(read_fd, selectors.EVENT_READ)
        self._tell(Begun(task.number))

    def _be_child(self, task: Compile, compiler: GrammarCompiler, pipe: tuple[int, int], errors: int) -> NoReturn:
        """What the child does, whatever happens: it must never come back to the loop of its parent."""
        read_fd, write_fd = pipe
        try:
            # With these open in a child the engine would not notice that this process is gone.
            for fd in (read_fd, self._source.fileno(), self._sink.fileno(), *self._children):
                os.close(fd)
            os.dup2(errors, 2)
            run_child(
                task,
                compiler,
                self._hello.vocabulary,
                write_fd,
                timeout_s=self._hello.timeout_s,
                memory_bytes=self._hello.memory_bytes,
                mask_s=self._hello.mask_s,
            )
        finally:
            os._exit(1)

    def _receive(self, fd: int) -> None:
        child = self._children[fd]
        try:
            chunk = os.read(fd, _CHUNK)
        except BlockingIOError:
            return
        child.data += chunk
        if len(child.data) > MAX_RESULT_BYTES:
            self._reap(fd, kill=True)
            size = f"The compiled grammar is larger than {MAX_RESULT_BYTES >> 20} MiB."
            self._tell(Outcome(child.task.number, "limit", message=size))
        elif not chunk:
            self._tell(self._outcome(child, *self._reap(fd)))

    def _stop_late_ones(self) -> None:
        now = monotonic()
        for fd, child in list(self._children.items()):
            if now >= child.deadline:
                self._reap(fd, kill=True)
                self._tell(Outcome(child.task.number, "limit", message=self._too_long()))

    def _outcome(self, child: Child, status: int, errors: str) -> Outcome:
        """What a child that has ended by itself leaves."""
        number = child.task.number
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0 and child.data:
            try:
                outcome: Outcome = pickle.loads(child.data)
            except Exception as error:  # the library has written where it must not, or the answer does not travel
                return Outcome(number, "crashed", message=f"The answer cannot be read: {described(error)}")
            if outcome.kind == "limit":
                return Outcome(number, "limit", message=self._too_large())
            return outcome
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 2:
            return Outcome(number, "limit", message=self._too_large())
        code = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if code in (signal.SIGXCPU, signal.SIGKILL):
            return Outcome(number, "limit", message=self._too_long() if code == signal.SIGXCPU else self._too_large())
        if "alloc" in errors and code in _CRASHES:
            return Outcome(number, "limit", message=self._too_large())
        name = signal.Signals(code).name if code else f"status {os.waitstatus_to_exitcode(status)}"
        said = f": {errors}" if errors else ""
        return Outcome(number, "crashed", message=f"The library crashed ({name}) while it compiled the grammar{said}")

    def _too_long(self) -> str:
        return (
            f"Compiling the grammar took longer than {self._hello.timeout_s:g} s (structured.compile_timeout_s); "
            "it is too complex."
        )

    def _too_large(self) -> str:
        return (
            f"Compiling the grammar took more than {self._hello.memory_bytes >> 20} MiB of memory "
            "(structured.compile_memory_mib); it is too complex."
        )

    def _reap(self, fd: int, *, kill: bool = False) -> tuple[int, str]:
        """Take a child out, dead in the end: its status, and the last line that it wrote to its standard error."""
        child = self._children.pop(fd)
        self._selector.unregister(fd)
        os.close(fd)
        if kill:
            os.kill(child.pid, signal.SIGKILL)
        _, status = os.waitpid(child.pid, 0)
        with child.errors as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 4096))
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
        return status, lines[-1][-300:] if lines else ""

    def _seconds_left(self) -> float | None:
        if not self._children:
            return None
        return max(0.0, min(child.deadline for child in self._children.values()) - monotonic())

    def _tell(self, message: Outcome | Begun | Alive) -> None:
        messages.write(self._sink, message)


def main() -> None:
    """Entry of the process. What a library prints must not get between the messages: they keep the descriptor of the
    standard output for themselves."""
    source = os.fdopen(os.dup(0), "rb", buffering=0)
    sink = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICE_START)
    sys.path[:] = messages.read(source)
    try:
        server = CompileServer(source, sink)
    except EOFError:
        return
    except BaseException as error:  # the plugins of the engine cannot be found here: every request is told
        _refuse_all(source, sink, described(error))
        return
    server.run()


def _refuse_all(source: BinaryIO, sink: BinaryIO, message: str) -> None:
    try:
        while True:
            task = messages.read(source)
            if isinstance(task, Compile):
                messages.write(sink, Outcome(task.number, "failed", message=message))
    except (EOFError, BrokenPipeError):
        pass
