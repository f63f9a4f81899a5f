"""Runs requests on an asynchronous client: one task reads its outputs and takes them to whoever waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from llmkit.engine.async_client import AsyncEngineClient
from llmkit.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineDrainingError,
    EngineError,
    InvalidRequestError,
    RequestTimeoutError,
    described,
    renewed,
    shown,
)
from llmkit.frontend.async_submission import Inbox, Submission, timeout_error
from llmkit.frontend.hand_over import HandOver
from llmkit.frontend.input_processor import PreparedRequest
from llmkit.frontend.output_processor import OutputProcessor, RequestState
from llmkit.metrics.record import RequestRecord
from llmkit.requests.message import EngineOutput, FinishReason

logger = logging.getLogger("llmkit.frontend")

MAX_TIMEOUT_S = 1e6
"""Longest timeout of a request; event loops cannot count much further."""

OUTPUTS_AT_A_TIME = 64
"""Outputs that are made into text before everybody else on the event loop has a turn."""

_Open = tuple[RequestState, Inbox, asyncio.TimerHandle | None]


class AsyncRequestLoop:
    """Used from one event loop; when that is closed, from another one, which finds none of the old one's requests.

    The reading task starts with the first request. on_ended: called with the record of every request that ends; what
    they raise is logged.
    """

    def __init__(self, client: AsyncEngineClient, outputs: OutputProcessor) -> None:
        self.client = client
        self._outputs = outputs
        self._hand_over = HandOver(client.add, self._end_all)
        self._open: dict[str, _Open] = {}
        self._reader: asyncio.Task[None] | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._idle = asyncio.Event()
        self._draining = False
        self._end: EngineError | None = None
        self.on_ended: list[Callable[[RequestRecord], None]] = []

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def check_open(self) -> None:
        """Raises EngineClosedError, EngineDeadError or EngineDrainingError if no request can be taken."""
        if self._end is not None:
            raise renewed(self._end)
        if self._draining:
            raise EngineDrainingError("the engine finishes its requests and takes no new ones.")

    def submit(self, prepared: PreparedRequest, timeout: float | None = None) -> Submission:
        """Hand over a request. timeout: seconds from now until it is aborted. Raises as `check_open` does."""
        self.check_open()
        _check_timeout(timeout)
        loop = self._attach()
        inbox = Inbox()
        state = self._outputs.add(prepared, inbox.notify)
        request_id = prepared.engine_request.request_id
        try:
            self._hand_over.take(prepared.engine_request, resting=len(self._open) == len(self._hand_over))
        except BaseException:
            self._outputs.drop([request_id])
            raise
        timer = None if timeout is None else loop.call_later(timeout, self._expire, request_id, timeout)
        self._open[request_id] = (state, inbox, timer)
        self._idle.clear()
        return Submission(self, prepared, state, inbox)

    def abort(self, states: Iterable[RequestState]) -> None:
        """End those of `states` that are unfinished; their readers get what there is, with finish reason "abort"."""
        ids = [state.prepared.engine_request.request_id for state in states]
        self._end_requests([request_id for request_id in ids if request_id in self._open])

    def abort_named(self, request_ids: Iterable[str]) -> None:
        """`abort` by the ids that callers know; unknown ones are ignored, equal ones all meant."""
        wanted = set(request_ids)
        self.abort([state for state, _, _ in self._open.values() if state.prepared.request_id in wanted])

    def forget(self, request_id: str, event_loop: asyncio.AbstractEventLoop) -> None:
        """Nobody can read this request any more. Called by the garbage collector, in any thread."""
        if request_id in self._open:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                event_loop.call_soon_threadsafe(self._forget, request_id)

    def _forget(self, request_id: str) -> None:
        if request_id in self._open:
            self._end_requests([request_id])

    async def call(self, method: str, *arguments: Any) -> Any:
        """`AsyncEngineClient.call`, behind what was submitted before it."""
        self._hand_over.flush()
        return await self.client.call(method, *arguments)

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no new requests and wait for those that run; whether all have ended within `timeout` seconds."""
        _check_timeout(timeout)
        self._draining = True
        if self._open:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._idle.wait()
        return not self._open

    async def close(self) -> None:
        """End everything and close the client. May be called twice."""
        self._end_all(EngineClosedError("the engine has been closed."))
        reader, self._reader = self._reader, None
        if reader is not None and reader.get_loop() is asyncio.get_running_loop():
            reader.cancel()
            await asyncio.wait([reader])
        await self.client.close()

    # The reading task

    def _attach(self) -> asyncio.AbstractEventLoop:
        """The running event loop, with a task that reads outputs on it. Raises EngineError if another one has it."""
        loop = asyncio.get_running_loop()
        if self._reader is not None and not self._reader.done():
            if self._event_loop is loop:
                return loop
            if self._event_loop is not None and not self._event_loop.is_closed():
                raise EngineError("the engine is in use by another event loop: use it from one at a time.")
        self._end_requests(list(self._open))  # of an event loop that is gone
        self._event_loop, self._idle = loop, asyncio.Event()
        self._hand_over = HandOver(self.client.add, self._end_all)
        self._reader = loop.create_task(self._read(), name="llmkit-outputs")
        return loop

    async def _read(self) -> None:
        try:
            while True:
                outputs = await self.client.outputs()
                for start in range(0, len(outputs), OUTPUTS_AT_A_TIME):
                    self._process(outputs[start : start + OUTPUTS_AT_A_TIME])
                    await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._end_requests(list(self._open))
            raise
        except EngineError as error:
            self._end_all(error)
        except Exception as error:
            logger.exception("the outputs of the engine cannot be read")
            self._end_all(EngineDeadError(f"The outputs of the engine cannot be read: {described(error)}"))

    def _process(self, outputs: list[EngineOutput]) -> None:
        stopped = self._outputs.process(outputs)
        if stopped:
            self.client.abort_sequences(stopped)
        for request_id in {output.request_id for output in outputs}:
            opened = self._open.get(request_id)
            if opened is not None and opened[0].finished:
                self._remove(request_id)
                self._tell_ended(opened[0].record())

    def _tell_ended(self, record: RequestRecord) -> None:
        for tell in self.on_ended:
            try:
                tell(record)
            except Exception:
                logger.exception("%r failed over the end of request %r", tell, record.request_id)

    def _remove(self, request_id: str) -> tuple[RequestState, Inbox]:
        state, inbox, timer = self._open.pop(request_id)
        if timer is not None:
            timer.cancel()
        if not self._open:
            self._idle.set()
        return state, inbox

    def _expire(self, request_id: str, timeout: float) -> None:
        if request_id in self._open:
            self._end_requests([request_id], timeout_error(timeout))

    def _end_requests(self, ids: list[str], error: EngineError | None = None) -> None:
        """Abort requests in the engine. Their readers get `error`, or an end with reason "abort"."""
        if not ids:
            return
        self._outputs.drop(ids)
        for request_id in ids:
            state, inbox = self._remove(request_id)
            state.metrics.finished_time = time.monotonic()
            if error is None:
                state.end("abort")
                inbox.notify(state)
            else:
                inbox.fail(error)
            reason: FinishReason = "abort" if error is None or isinstance(error, RequestTimeoutError) else "error"
            self._tell_ended(state.record(reason, None if error is None else error.message))
        handed_over = self._hand_over.withdraw(ids)
        if self._end is None and handed_over:
            self.client.abort(handed_over)

    def _end_all(self, error: EngineError) -> None:
        """Nothing goes on: every request ends with `error`."""
        self._end = self._end or error
        self._end_requests(list(self._open), self._end)


def _check_timeout(timeout: Any) -> None:
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 <= timeout <= MAX_TIMEOUT_S:
        raise InvalidRequestError(
            f"timeout must be a number of seconds from 0 to {MAX_TIMEOUT_S:g}, or None, got {shown(timeout)}.",
            param="timeout",
        )
