"""One request of an asynchronous frontend, as its caller holds it."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from llmkit.errors import (
    EngineError,
    EngineOverloadedError,
    InvalidRequestError,
    RequestFailedError,
    RequestTimeoutError,
    renewed,
)
from llmkit.frontend.input_processor import PreparedRequest
from llmkit.frontend.output_processor import RequestState
from llmkit.requests.output import RequestOutput

if TYPE_CHECKING:
    from llmkit.frontend.async_request_loop import AsyncRequestLoop


class Inbox:
    """Where the news of one request meet its reader.

    error: what ends the reading once everything that came before it was taken.
    """

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.error: EngineError | None = None

    def notify(self, state: RequestState) -> None:
        """For `OutputProcessor.add`."""
        del state
        self.changed.set()

    def fail(self, error: EngineError) -> None:
        self.error = self.error or error
        self.changed.set()


class Submission:
    """A request that was handed over; iterate over it for its outputs, in one task.

    An output holds what its sampling parameters' output_kind says. What has come since the last one was taken is one
    output: a slow reader gets fewer and longer ones, and nothing piles up. A task that is cancelled while it waits here
    aborts the request, and so does whoever forgets the object. request_id: as in the outputs.
    """

    def __init__(self, loop: AsyncRequestLoop, prepared: PreparedRequest, state: RequestState, inbox: Inbox) -> None:
        self._loop = loop
        self._state = state
        self._inbox = inbox
        self._done = False
        self.request_id = prepared.request_id
        self.prompt_token_ids = prepared.engine_request.prompt_token_ids
        engine_id = prepared.engine_request.request_id
        self._forgotten = weakref.finalize(self, loop.forget, engine_id, asyncio.get_running_loop())
        self._forgotten.atexit = False

    @property
    def finished(self) -> bool:
        """Whether nothing comes any more but what has not been taken yet."""
        return self._state.finished or self._inbox.error is not None

    async def first(self) -> None:
        """Wait until the engine has begun to answer, or has refused the request.

        Raises InvalidRequestError for a refusal that names a field of the request, RequestFailedError if it has ended
        otherwise without a single token (RequestTimeoutError after its timeout, EngineOverloadedError if the engine had
        no room for it in time), and what has become of the engine.
        """
        state, inbox = self._state, self._inbox
        while not state.started and inbox.error is None:
            await self._news()
        if any(answer.num_tokens for answer in state.answers):
            return
        if inbox.error is not None:
            raise renewed(inbox.error)
        if state.error is not None and state.finished:
            if state.error_param is not None:
                raise InvalidRequestError(state.error, param=state.error_param)
            raise (EngineOverloadedError if state.overloaded else RequestFailedError)(state.error)

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output. A request that fails ends with one whose finish reason is "error".

        Raises RequestTimeoutError, EngineDeadError or EngineClosedError once all that was said before was taken.
        """
        if self._done:
            raise StopAsyncIteration
        while not self._state.ready:
            if self._inbox.error is not None:
                self._done = True
                raise renewed(self._inbox.error)
            await self._news()
        output = self._state.take()
        self._done = output.finished
        return output

    async def _news(self) -> None:
        self._inbox.changed.clear()
        try:
            await self._inbox.changed.wait()
        except asyncio.CancelledError:
            self.abort()
            raise

    def abort(self) -> None:
        """End the request, if it has not ended; its reader gets what there is, with finish reason "abort"."""
        self._loop.abort([self._state])

    async def aclose(self) -> None:
        """`abort`, and no more outputs."""
        self.abort()
        self._done = True


def timeout_error(seconds: float) -> RequestTimeoutError:
    return RequestTimeoutError(f"the request was not done within its {seconds:g} s.")
