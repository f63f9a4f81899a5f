"""The engine in a thread of this process: its step loop runs beside the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmkit.engine.async_client import EngineHealth, refusal
from llmkit.engine.idle_transfers import IdleTransfers
from llmkit.engine.utilities import run_utility
from llmkit.errors import EngineClosedError, EngineDeadError, EngineError, described, renewed
from llmkit.requests.message import EngineOutput, EngineRequest

if TYPE_CHECKING:
    from llmkit.engine.factory import Engine

logger = logging.getLogger("llmkit.engine")

MAX_BROKEN_STEPS = 3
"""So many steps in a row that raise, and the engine is given up. A step that fails in the executor raises nothing."""

EXIT_WAIT_S = 10.0
"""Seconds that the end of the interpreter waits for an engine that nobody has closed."""


@dataclass(slots=True)
class _Call:
    method: str
    arguments: tuple[Any, ...]
    future: concurrent.futures.Future[Any]


class ThreadClient:
    """An `AsyncEngineClient` whose engine lives in a thread, which builds, runs and closes it.

    build: makes the engine; what it raises, the constructor raises. The constructor waits for it.
    """

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._loop = _StepLoop(build)
        thread = threading.Thread(target=self._loop.run, name="llmkit-engine", daemon=True)
        # A thread that is in the middle of a step when the interpreter goes away would crash it.
        self._stop = weakref.finalize(self, _stop_and_wait, self._loop, thread)
        thread.start()
        try:
            self._loop.started.result()
        except BaseException:
            self._loop.stop()
            raise

    def add(self, requests: Sequence[EngineRequest]) -> None:
        self._loop.add(requests)

    def abort(self, request_ids: Iterable[str]) -> None:
        self._loop.abort([(request_id, None) for request_id in request_ids])

    def abort_sequences(self, sequences: Iterable[tuple[str, int]]) -> None:
        self._loop.abort(list(sequences))

    async def outputs(self) -> list[EngineOutput]:
        return await self._loop.outbox.take()

    async def call(self, method: str, *arguments: Any) -> Any:
        call = _Call(method, arguments, concurrent.futures.Future())
        self._loop.call(call)
        return await asyncio.wrap_future(call.future)

    @property
    def health(self) -> EngineHealth:
        return self._loop.health()

    async def close(self) -> None:
        self._loop.stop()
        await asyncio.shield(asyncio.wrap_future(self._loop.ended))
        self._stop.detach()


class _StepLoop:
    """What the two threads share. `run` is the engine's thread; everything else may be called from any.

    Requests wait in `_adds`, by id, so that an abort takes one out which the engine has not seen yet, and what has
    to be aborted in the engine is never behind what has to be added. `_lock` is never held while the engine works.
    started: done once the engine is built. ended: once it is closed.
    """

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._build = build
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._adds: dict[str, EngineRequest] = {}
        self._aborts: list[tuple[str, int | None]] = []
        self._calls: deque[_Call] = deque()
        self._stopping = False
        self._death: EngineDeadError | None = None
        self._busy_since: float | None = None
        self._num_broken = 0
        self.outbox = _Outbox()
        self.started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()

    # Any thread

    def add(self, requests: Sequence[EngineRequest]) -> None:
        with self._changed:
            self._check_running()
            self._adds |= {request.request_id: request for request in requests}
            self._busy_since = self._busy_since or time.monotonic()
            self._changed.notify()

    def abort(self, sequences: list[tuple[str, int | None]]) -> None:
        with self._changed:
            for request_id, index in sequences:
                if index is not None or self._adds.pop(request_id, None) is None:
                    self._aborts.append((request_id, index))
            self._changed.notify()

    def call(self, call: _Call) -> None:
        with self._changed:
            self._check_running()
            self._calls.append(call)
            self._changed.notify()

    def stop(self) -> None:
        """Let the loop end after the step that runs."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self.outbox.end(EngineClosedError("the engine has been closed."))

    def health(self) -> EngineHealth:
        since, death = self._busy_since, self._death
        if death is not None:
            return EngineHealth(alive=False, ready=False, error=death.message)
        running = not self._stopping
        stuck = time.monotonic() - since if running and since is not None else 0.0
        return EngineHealth(alive=running, ready=running, stuck_s=stuck)

    def _check_running(self) -> None:
        if self._death is not None:
            raise renewed(self._death)
        if self._stopping:
            raise EngineClosedError("the engine has been closed.")

    # The engine's thread

    def run(self) -> None:
        """Build the engine, take steps until `stop` or its death, close it."""
        try:
            engine = self._build()
        except BaseException as error:
            self._stopping = True
            self.started.set_exception(error)
            self.ended.set_result(None)
            return
        self.started.set_result(None)
        try:
            idle = IdleTransfers(engine.core)
            while self._wait_for_work(engine, idle):
                num_calls = len(self._calls)
                self._take_requests(engine)  # among them those that were added before these calls were made
                self._take_calls(engine, num_calls)
                self._step(engine, idle)
        except EngineDeadError as error:
            self._die(error)
        except BaseException as error:
            logger.exception("the engine's loop cannot go on")
            self._die(EngineDeadError(f"The engine has ended: {described(error)}"))
        finally:
            self._refuse_calls()
            self._close(engine)

    def _wait_for_work(self, engine: Engine, idle: IdleTransfers) -> bool:
        """Wait until there is something to do; False if that is to stop."""
        with self._changed:
            if not (engine.core.has_work() or self._adds):
                self._busy_since = None
            while not (self._stopping or self._adds or self._aborts or self._calls or engine.core.has_work()):
                seconds = idle.seconds_left()
                if seconds == 0.0:
                    self._busy_since = time.monotonic()
                    break
                self._changed.wait(seconds)
            return not self._stopping

    def _take_calls(self, engine: Engine, count: int) -> None:
        for _ in range(count):
            call = self._calls.popleft()
            if not call.future.set_running_or_notify_cancel():
                continue
            try:
                call.future.set_result(run_utility(engine, call.method, call.arguments))
            except BaseException as error:
                call.future.set_exception(error)

    def _take_requests(self, engine: Engine) -> None:
        """Apply all aborts, then take in requests one by one, aborts always first."""
        while True:
            with self._lock:
                aborts, self._aborts = self._aborts, []
                first = next(iter(self._adds), None)
                request = None if first is None else self._adds.pop(first)
            for request_id, index in aborts:
                if index is None:
                    engine.core.abort([request_id])
                else:
                    engine.core.abort_sequence(request_id, index)
            if request is None:
                return
            try:
                engine.core.add(request)
            except Exception as error:
                self.outbox.put(refusal(request, error))

    def _step(self, engine: Engine, idle: IdleTransfers) -> None:
        if not engine.core.has_work():
            idle.run()
            return
        idle.busy()
        try:
            outputs = engine.core.step()
        except BaseException as error:
            logger.exception("the engine's step loop was broken off")
            self._num_broken += 1
            if self._num_broken >= MAX_BROKEN_STEPS:
                message = f"The engine has ended: {self._num_broken} steps in a row failed, the last one with "
                raise EngineDeadError(f"{message}{described(error)}") from error
            return
        self._busy_since = time.monotonic()
        if outputs:
            if any(output.error is None for output in outputs):
                self._num_broken = 0
            self.outbox.put(outputs)

    def _die(self, error: EngineDeadError) -> None:
        logger.error("%s", error)
        with self._lock:
            self._death = error
            self._adds.clear()
        self.outbox.end(error)

    def _refuse_calls(self) -> None:
        with self._lock:
            self._stopping = True
            calls, self._calls = self._calls, deque()
        for call in calls:
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(self._death or EngineClosedError("the engine has been closed."))

    def _close(self, engine: Engine) -> None:
        try:
            engine.close()
            del engine
            gc.collect()  # layers and their context refer to one another
        except Exception:
            logger.exception("the engine could not be closed properly")
        finally:
            self.ended.set_result(None)


class _Outbox:
    """Outputs on their way from the engine's thread to the event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outputs: list[EngineOutput] = []
        self._end: EngineError | None = None
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def put(self, outputs: list[EngineOutput]) -> None:
        with self._lock:
            self._outputs += outputs
            waiting, self._waiting = self._waiting, []
        _wake(waiting)

    def end(self, error: EngineError) -> None:
        """Nothing comes any more: once all is taken, `take` raises `error`. The first error counts."""
        with self._lock:
            self._end = self._end or error
            waiting, self._waiting = self._waiting, []
        _wake(waiting)

    async def take(self) -> list[EngineOutput]:
        while True:
            with self._lock:
                if self._outputs:
                    outputs, self._outputs = self._outputs, []
                    return outputs
                if self._end is not None:
                    raise renewed(self._end)
                loop = asyncio.get_running_loop()
                news = loop.create_future()
                self._waiting.append((loop, news))
            await news


def _wake(waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]]) -> None:
    def set_result(future: asyncio.Future[None]) -> None:
        if not future.done():
            future.set_result(None)

    for loop, future in waiting:
        with contextlib.suppress(RuntimeError):  # the event loop was closed meanwhile
            loop.call_soon_threadsafe(set_result, future)


def _stop_and_wait(loop: _StepLoop, thread: threading.Thread) -> None:
    loop.stop()
    if thread is not threading.current_thread():
        thread.join(EXIT_WAIT_S)
