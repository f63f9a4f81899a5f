"""Grammars for the engine core: from a task to a compiled grammar, without ever holding up the step loop."""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np

from llmkit.errors import InvalidRequestError, described
from llmkit.grammars.backends import PRELOADED
from llmkit.grammars.cache import GrammarCache, GrammarFailure, Key, ReadyGrammar
from llmkit.grammars.compile_messages import Compile, Hello, Outcome
from llmkit.grammars.compile_process import CompileProcess
from llmkit.grammars.disposal import Disposal
from llmkit.grammars.short_turns import short_turns, step_back
from llmkit.requests.grammar_task import GrammarTask

if TYPE_CHECKING:
    from llmkit.config.sections import StructuredConfig
    from llmkit.grammars.backends import GrammarBackends
    from llmkit.hookspecs.structured import GrammarRequest

logger = logging.getLogger("llmkit.grammars")

STACK_BYTES = 16 << 20
"""Stack of the threads that load: more than the child had in which the same was tried."""

LOADERS = 2
NICE = 10
"""Niceness of these threads: to load may be to compile again, for seconds, while the steps need every processor."""


@dataclass(eq=False)
class Ticket:
    """A task under way. result: the grammar, or why there is none; None until it is known. tried: engine → why it
    failed, of those before the current one. deadline: an engine that has not begun with it by then does not."""

    task: GrammarTask
    deadline: float = math.inf
    result: ReadyGrammar | GrammarFailure | None = None
    position: int = 0
    tried: dict[str, str] = field(default_factory=dict)
    key: Key | None = None

    @property
    def backend(self) -> str:
        return self.task.backends[self.position]


@dataclass(eq=False)
class _Pending:
    """A grammar that is being compiled, for everybody who waits for it. begun: it does not wait for others any more."""

    number: int
    key: Key
    tickets: list[Ticket] = field(default_factory=list)
    begun: bool = False


class GrammarService:
    """Compiles in the compile process, loads in threads, keeps a cache. `submit`, `cancel`, `finished` and `wait` come
    from the thread of the step loop; none of them compiles, loads or waits for a lock that somebody keeps.

    Equal grammars are compiled once, however many wait. An engine that refuses, crashes or needs too much is followed
    by the next of the task's engines, which is asked for its problems there too, as long as it has waited less than
    `structured.compile_wait_s` for its turns, the compilations before them included.
    """

    def __init__(
        self, backends: GrammarBackends, config: StructuredConfig, clock: Callable[[], float] = monotonic
    ) -> None:
        self._backends = backends
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._numbers = itertools.count()
        self._cache = GrammarCache(config.cache_mib << 20)
        self._pending: dict[Key, _Pending] = {}
        self._by_number: dict[int, _Pending] = {}
        self._finished: deque[Ticket] = deque()
        self._next_deadline = math.inf  # no ticket that waits has an earlier one
        self._loaders: ThreadPoolExecutor | None = None
        self._process = CompileProcess(self._hello, self._begun, self._arrived)
        self._disposal = Disposal()
        self._closed = False

    @property
    def cache(self) -> GrammarCache:
        return self._cache

    @property
    def process(self) -> CompileProcess:
        return self._process

    @property
    def backends(self) -> GrammarBackends:
        return self._backends

    @property
    def num_waiting(self) -> int:
        """Grammars that no engine has begun with."""
        with self._lock:
            return sum(not pending.begun for pending in self._pending.values())

    def preload(self) -> None:
        """What the first grammar would otherwise bring along: import the library of the engine that most requests will
        have, in this thread, and start the compile process with a grammar for it. As `GrammarBackends.preload`, raises
        nothing."""
        backend = self._backends.preload()
        if backend is not None and self._backends.why_not(backend, PRELOADED) is None:
            self.submit(GrammarTask(PRELOADED, (backend.choice,)))

    def submit(self, task: GrammarTask) -> Ticket:
        """Have a grammar made. The ticket may have its result at once; otherwise `finished` returns it one day."""
        limit_s = self._config.compile_wait_s
        ticket = Ticket(task, math.inf if limit_s is None else self._clock() + limit_s)
        self._start(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Its request is gone. A grammar that nobody else waits for is not compiled any further."""
        with self._lock:
            pending = self._pending.get(ticket.key) if ticket.key is not None else None
            if pending is None or ticket not in pending.tickets:
                return
            unwanted = self._forget(pending, ticket)
        if unwanted:
            self._process.cancel(pending.number)

    def finished(self) -> list[Ticket]:
        """Tickets that have got their result since the last call."""
        self._news.clear()
        tickets = self._expire()
        while self._finished:
            tickets.append(self._finished.popleft())
        return tickets

    def wait(self, timeout_s: float) -> None:
        """Until `finished` has something to return, or the time is over."""
        self._news.wait(timeout_s)

    def close(self) -> None:
        """End the compile process and the threads. May be called twice."""
        self._closed = True
        self._process.close()
        if self._loaders is not None:
            self._loaders.shutdown(wait=True, cancel_futures=True)
        self._disposal.close()

    # ---- the end of waiting

    def _expire(self) -> list[Ticket]:
        """End the wait of those whose turn has not come in time."""
        now = self._clock()
        if now < self._next_deadline:
            return []
        with self._lock:
            waiting = [(p, ticket) for p in self._pending.values() if not p.begun for ticket in p.tickets]
            late = [(pending, ticket) for pending, ticket in waiting if ticket.deadline <= now]
            unwanted = [pending.number for pending, ticket in late if self._forget(pending, ticket)]
            self._next_deadline = min((t.deadline for _, t in waiting if t.deadline > now), default=math.inf)
        for number in unwanted:
            self._process.cancel(number)
        for _, ticket in late:
            ticket.result = self._too_late(ticket)
        return [ticket for _, ticket in late]

    def _forget(self, pending: _Pending, ticket: Ticket) -> bool:
        """Take `ticket` out of those who wait for `pending`, with the lock. Whether nobody waits for it any more."""
        pending.tickets.remove(ticket)
        if pending.tickets:
            return False
        del self._pending[pending.key]
        self._by_number.pop(pending.number, None)
        return True

    def _too_late(self, ticket: Ticket) -> GrammarFailure:
        limit = f"{self._config.compile_wait_s:g} s (structured.compile_wait_s)"
        if not ticket.tried:
            message = f"The grammar waited longer than {limit} for its turn to be compiled; try again later."
            return GrammarFailure(message, refused=False, overloaded=True)
        return _failed_by_all({**ticket.tried, ticket.backend: f"not tried any more after {limit}"}, refused=True)

    # ---- one engine after another

    def _start(self, ticket: Ticket) -> None:
        """Ask for the grammar of the ticket's current engine."""
        key = (ticket.backend, ticket.task.request)
        with self._lock:
            ticket.key = key
            known = self._cache.get(key)
            pending = self._pending.get(key)
            if known is None and pending is not None:
                pending.tickets.append(ticket)
                self._next_deadline = min(self._next_deadline, ticket.deadline)
                return
            if known is None:
                pending = self._pending[key] = _Pending(next(self._numbers), key, [ticket])
                self._by_number[pending.number] = pending
                self._next_deadline = min(self._next_deadline, ticket.deadline)
        if isinstance(known, ReadyGrammar):
            ticket.result = known
        elif isinstance(known, GrammarFailure):
            self._failed(ticket, known)
        else:
            assert pending is not None
            unasked = ticket.position > 0 or not ticket.task.judged
            check = not ticket.task.judged and not ticket.tried
            self._process.send(Compile(pending.number, *key, again=bool(ticket.tried), check=check, ask=unasked))

    def _failed(self, ticket: Ticket, failure: GrammarFailure) -> None:
        """The current engine has no grammar for the ticket: the next, or the end."""
        ticket.tried[ticket.backend] = failure.message
        for position in range(ticket.position + 1, 0 if failure.final else len(ticket.task.backends)):
            ticket.position = position
            why_not = self._backends.why_unusable(self._backends.backend(ticket.backend))
            if why_not is None and self._clock() >= ticket.deadline:
                ticket.result = self._too_late(ticket)
                return
            if why_not is None:
                self._start(ticket)
                return
            ticket.tried[ticket.backend] = why_not
        if len(ticket.tried) == 1 or failure.final:
            ticket.result = failure
        else:
            ticket.result = _failed_by_all(ticket.tried, failure.refused)

    # ---- in threads of the compile process and of the loaders

    def _hello(self) -> Hello:
        config = self._config
        return Hello(
            self._backends.registry.of_kind("structured"),
            self._backends.vocabulary,
            config.compile_timeout_s,
            config.compile_memory_mib << 20,
            config.compile_processes,
            config.mask_timeout_s / 2,  # the others wait as long, and more where the engine has less than a core
        )

    def _begun(self, number: int) -> None:
        with self._lock:
            pending = self._by_number.get(number)
            if pending is not None:
                pending.begun = True

    def _arrived(self, outcome: Outcome) -> None:
        with self._lock:
            pending = self._by_number.get(outcome.number)
            if pending is None or self._closed:
                return
            if outcome.kind == "compiled" and self._loaders is None:
                self._loaders = _loaders()
        if outcome.kind == "compiled":
            assert self._loaders is not None
            self._loaders.submit(self._load, pending, outcome)
            return
        backend = pending.key[0]
        if outcome.kind in ("crashed", "failed"):
            self._backends.backend(backend).breaker.record(outcome.message)
        self._settle(pending, _failure(backend, outcome))

    def _load(self, pending: _Pending, outcome: Outcome) -> None:
        choice, request = pending.key
        result: ReadyGrammar | GrammarFailure
        try:
            with short_turns():  # the first time, the library is imported
                result = self._loaded(choice, request, outcome.data)
        except InvalidRequestError as error:
            result = GrammarFailure(error.message)
        except BaseException as error:
            logger.warning("the grammar engine %s failed to load a grammar", choice, exc_info=error)
            self._backends.backend(choice).breaker.record(error)
            result = GrammarFailure(f"The grammar engine {choice} failed: {described(error)}", refused=False)
        self._settle(pending, result)

    def _loaded(self, choice: str, request: GrammarRequest, data: bytes) -> ReadyGrammar:
        compiled = self._backends.compiler(choice).load(request, data)
        row = np.zeros(self._backends.vocabulary.num_words, dtype=np.int32)
        grammar = compiled.start()
        grammar.fill_bitmask(row)
        row.flags.writeable = False
        ready = ReadyGrammar(choice, compiled, row, bool(grammar.is_accepting()))
        self._disposal.watch(ready)
        return ready

    def _settle(self, pending: _Pending, result: ReadyGrammar | GrammarFailure) -> None:
        with self._lock:
            self._cache.put(pending.key, result)
            if self._pending.get(pending.key) is pending:
                del self._pending[pending.key]
            self._by_number.pop(pending.number, None)
            tickets, pending.tickets = pending.tickets, []
        for ticket in tickets:
            if isinstance(result, ReadyGrammar):
                ticket.result = result
            else:
                self._failed(ticket, result)
            if ticket.result is not None:
                self._finished.append(ticket)
        self._news.set()


def _failed_by_all(tried: dict[str, str], refused: bool) -> GrammarFailure:
    words = " ".join(f"{name}: {why.rstrip('.')}." for name, why in tried.items())
    return GrammarFailure(f"No grammar engine could compile this. {words}", refused)


def _failure(backend: str, outcome: Outcome) -> GrammarFailure:
    if outcome.kind == "malformed":
        return GrammarFailure(outcome.message, final=True)
    if outcome.kind == "refused":
        return GrammarFailure(f"The grammar engine {backend} refuses it: {outcome.message}")
    if outcome.kind == "limit":
        return GrammarFailure(outcome.message)
    return GrammarFailure(f"The grammar engine {backend} failed: {outcome.message}", refused=False)


def _loaders() -> ThreadPoolExecutor:
    def start(executor: ThreadPoolExecutor) -> None:
        barrier = threading.Barrier(LOADERS + 1)
        for _ in range(LOADERS):
            executor.submit(barrier.wait)
        barrier.wait()

    def begin() -> None:
        step_back(threading.get_native_id(), NICE)

    executor = ThreadPoolExecutor(LOADERS, thread_name_prefix="llmkit-grammar-loader", initializer=begin)
    before = threading.stack_size(STACK_BYTES)
    try:
        start(executor)  # the threads that exist now keep the stack that they were made with
    finally:
        threading.stack_size(before)
    return executor
