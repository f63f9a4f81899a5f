"""Grammars taken on by a token in threads beside the step loop, which waits for them only a moment.

A mask takes microseconds as a rule, and may take half a minute where a grammar is ambiguous; nothing can stop a library
in the middle of it. So the step loop hands the rows of a step to a thread and waits WAIT_S for all of them together. A
row that is late is left out of the steps until it has its mask; where that takes more than the limit, the request ends,
and the thread, which goes on until the library returns, has the lowest priority and nothing to do behind it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from llmkit.errors import described
from llmkit.grammars.cache import GrammarFailure
from llmkit.grammars.short_turns import short_turns, step_back

if TYPE_CHECKING:
    from llmkit.requests.message import EngineOutput
    from llmkit.requests.request import Request
    from llmkit.scheduling.sequence_grammar import SequenceGrammar

WAIT_S = 0.01
"""How long a step waits for the masks of its rows, in seconds."""

NUM_SLOW = 2
"""Threads for grammars whose last mask was slow: no step waits for these."""

CLOCK_RATIO = 10
"""The limit is one of processor time; a mask that gets none, or needs none, ends after so many times the limit."""

MAX_LOST = 8
"""Threads that may be at masks of one grammar engine which have been given up, before it gets no further requests."""

NICE_LATE, NICE_LOST = 10, 19
_NAME = "llmkit-masks"


def any_at_work() -> bool:
    """Whether a thread of a closed `MaskThreads` is still at a mask. An interpreter that ends must not be taken down
    then: the library comes back into it, and aborts the process."""
    return any(thread.name == _NAME for thread in threading.enumerate())


@dataclass(eq=False)
class MaskJob:
    """A row's sampled token that its grammar has to take, and the mask behind it. output: of that row, not told before
    this has ended or is given up. wrong: what the grammar has found wrong; given_up: why nobody waits for that. thread:
    that has begun with it, at begun_s of its own clock."""

    request: Request
    token_id: int
    last: bool
    output: EngineOutput
    wrong: GrammarFailure | None = None
    given_up: GrammarFailure | None = None
    ended: bool = False
    thread: _MaskThread | None = field(default=None, repr=False)
    begun_s: float = 0.0
    begun_at: float = 0.0

    @property
    def grammar(self) -> SequenceGrammar:
        assert self.request.grammar is not None
        return self.request.grammar

    @property
    def problem(self) -> GrammarFailure | None:
        """What ends the request; None if nothing does."""
        return self.given_up or self.wrong

    def run(self) -> None:
        """Take the token, find the mask."""
        try:
            self.wrong = self.grammar.advance([self.token_id], last=self.last)
        except BaseException as error:  # nobody else would tell of it
            self.wrong = GrammarFailure(f"The grammar failed: {described(error)}", refused=False)


class _MaskThread:
    """Does one job after the other. Only the step loop calls it."""

    def __init__(self, ended: SimpleQueue[MaskJob], niceness: int = 0) -> None:
        self._ended = ended
        self._jobs: SimpleQueue[MaskJob | threading.Event | None] = SimpleQueue()
        self.num_unfinished = 0
        self._clock = time.CLOCK_MONOTONIC
        self._niceness = niceness
        self._thread = threading.Thread(target=self._run, name=_NAME, daemon=True)
        self._thread.start()

    def submit(self, job: MaskJob) -> None:
        self.num_unfinished += 1
        self._jobs.put(job)

    def submitted(self) -> threading.Event:
        """Set when everything that has been submitted by now has ended: waking for every job would cost more than most
        of them take. Not set when the thread is let go before."""
        event = threading.Event()
        self._jobs.put(event)
        return event

    def let_go(self) -> list[MaskJob]:
        """It ends after the job that it is at. Those that it has not begun with."""
        left: list[MaskJob] = []
        with contextlib.suppress(Empty):
            while (job := self._jobs.get_nowait()) is not None:
                if isinstance(job, MaskJob):
                    left.append(job)
        self._jobs.put(None)
        return left

    def step_back(self, niceness: int) -> None:
        """Others come first from now on."""
        step_back(self._thread.native_id, niceness)

    def seconds(self) -> float:
        """Of processor time, where that can be told; safe to ask when the thread has ended."""
        try:
            return time.clock_gettime(self._clock)
        except OSError:
            return 0.0

    def join(self) -> None:
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        if sys.platform == "linux":
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        if self._niceness:
            self.step_back(self._niceness)
        while (job := self._jobs.get()) is not None:
            if isinstance(job, threading.Event):
                job.set()
                continue
            job.begun_s, job.begun_at = self.seconds(), time.monotonic()
            job.thread = self
            job.run()
            job.ended = True
            self._ended.put(job)
            del job  # whose request may be gone before the next one comes


class MaskThreads:
    """Used by the step loop. limit_s: processor time after which a job is given up, in seconds. wait_s: how long `run`
    waits."""

    def __init__(self, limit_s: float, wait_s: float = WAIT_S) -> None:
        self.limit_s = limit_s
        self.wait_s = wait_s
        self._ended: SimpleQueue[MaskJob] = SimpleQueue()
        self._quick: _MaskThread | None = None
        self._quick_since = 0.0  # when it got jobs that were left behind another thread's late one
        self._slow: list[_MaskThread] = []
        self._owner: dict[MaskJob, _MaskThread] = {}  # of every job that has neither ended nor been given up
        self._lost: list[tuple[str, _MaskThread]] = []  # engine, and a thread that is at a job of it that was given up
        self._late: list[MaskJob] = []  # ended since `run` has returned without them
        self._turns: ExitStack | None = None

    @property
    def num_late(self) -> int:
        """Rows that `take_late` will return one day."""
        return len(self._owner) + len(self._late)

    def num_lost(self, engine: str) -> int:
        """Threads that are still at a mask of that grammar engine which has been given up."""
        self._lost = [(name, thread) for name, thread in self._lost if thread.alive]
        return sum(name == engine for name, _ in self._lost)

    def run(self, jobs: Iterable[MaskJob]) -> set[MaskJob]:
        """Do `jobs`, each of another sequence; those of them that have ended when the wait is over. `take_late` returns
        the others. A grammar that was slow the last time is not waited for."""
        waited_for: set[MaskJob] = set()
        for job in jobs:
            if job.grammar.slow:
                self._submit_slow(job)
            else:
                waited_for.add(job)
                self._submit_quick(job)
        if waited_for:
            assert self._quick is not None
            self._quick.submitted().wait(self.wait_s)
        missing = set(waited_for)
        while missing and (job_ended := self._next_ended(0.0)) is not None:
            if job_ended in missing:
                missing.discard(job_ended)
            else:
                self._late.append(job_ended)
        if missing:
            self._replace_quick()
        for job in self._owner:
            job.grammar.pending = True
        self._share_interpreter()
        return waited_for - missing

    def take_late(self) -> list[MaskJob]:
        """Those that have ended by now, and those that have taken longer than the limit, which are given up."""
        if not self.num_late:
            return []
        while (job := self._next_ended(0.0)) is not None:
            self._late.append(job)
        if self._quick in self._owner.values() and time.monotonic() - self._quick_since > self.wait_s:
            self._replace_quick()  # what was left behind a late job is behind another one
        for job in list(self._owner):
            self._give_up_if_too_long(job)
        taken, self._late = self._late, []
        for job in taken:
            job.grammar.pending = False
        self._share_interpreter()
        return taken

    def wait(self, timeout_s: float) -> None:
        """Until `take_late` has something to return, or the time is over."""
        if not self._late and (job := self._next_ended(timeout_s)) is not None:
            self._late.append(job)

    def close(self) -> None:
        """End the threads; what a library is at goes on to its end. May be called twice."""
        threads = [thread for thread in (self._quick, *self._slow) if thread is not None]
        self._quick, self._slow = None, []
        busy = set(self._owner.values())
        self._owner.clear()
        self._late.clear()
        for thread in threads:
            thread.let_go()
            if thread not in busy:
                thread.join()
        self._share_interpreter()

    def _next_ended(self, timeout_s: float) -> MaskJob | None:
        """The next job that ends, if it has not been given up; None after `timeout_s` seconds."""
        try:
            while True:
                job = self._ended.get(timeout=timeout_s) if timeout_s > 0 else self._ended.get_nowait()
                thread = self._owner.pop(job, None)
                if thread is not None:
                    thread.num_unfinished -= 1
                    return job
        except Empty:
            return None

    def _submit_quick(self, job: MaskJob) -> None:
        if self._quick is None:
            self._quick = _MaskThread(self._ended)
        self._owner[job] = self._quick
        self._quick.submit(job)

    def _submit_slow(self, job: MaskJob) -> None:
        thread = min(self._slow, key=lambda thread: thread.num_unfinished, default=None)
        if thread is None or (thread.num_unfinished and len(self._slow) < NUM_SLOW):
            thread = _MaskThread(self._ended, NICE_LATE)
            self._slow.append(thread)
        self._owner[job] = thread
        thread.submit(job)

    def _replace_quick(self) -> None:
        """It is late with a job: the next ones are another thread's, and it ends after that job."""
        thread, self._quick = self._quick, None
        assert thread is not None
        thread.step_back(NICE_LATE)
        self._quick_since = time.monotonic()
        for job in thread.let_go():
            self._submit_quick(job)

    def _give_up_if_too_long(self, job: MaskJob) -> None:
        thread = job.thread
        if thread is None or job.ended:
            return
        seconds, elapsed = thread.seconds() - job.begun_s, time.monotonic() - job.begun_at
        if seconds <= self.limit_s and elapsed <= CLOCK_RATIO * self.limit_s:
            return
        job.given_up = job.grammar.too_slow(seconds if seconds > self.limit_s else elapsed, at_least=True)
        del self._owner[job]
        self._late.append(job)
        self._lost.append((job.grammar.engine, thread))
        thread.step_back(NICE_LOST)
        if thread in self._slow:
            self._slow.remove(thread)
            for other in thread.let_go():
                self._submit_slow(other)

    def _share_interpreter(self) -> None:
        """While a job runs beside the steps: it may be written in Python."""
        if self._owner and self._turns is None:
            self._turns = ExitStack()
            self._turns.enter_context(short_turns())
        elif not self._owner and self._turns is not None:
            self._turns.close()
            self._turns = None
