"""Runs requests on a client: hands them over, takes outputs to whoever waits for them, aborts what nobody wants."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from llmkit.engine.client import EngineClient
from llmkit.errors import EngineClosedError, EngineError, InvalidRequestError
from llmkit.frontend.input_processor import PreparedRequest
from llmkit.frontend.output_processor import Mailbox, OutputProcessor, RequestState
from llmkit.requests.output import RequestOutput


class RequestLoop:
    """Several callers may run requests at a time, in one thread (open streams) or in several.

    Whoever waits for an output runs the next step for all; `_lock` makes sure that only one does.
    """

    def __init__(self, client: EngineClient, outputs: OutputProcessor) -> None:
        self.client = client
        self._outputs = outputs
        self._lock = threading.RLock()
        self._closed = False

    def run(
        self, prepared: Sequence[PreparedRequest], finished: Callable[[RequestOutput], None]
    ) -> list[RequestOutput]:
        """The final outputs of requests whose output_kind is FINAL_ONLY, in order. Calls `finished` for each as it
        ends. If interrupted, all of them are aborted."""
        mailbox: Mailbox = deque()
        results: dict[int, RequestOutput] = {}
        states: list[RequestState] = []
        try:
            states = self._add(prepared, mailbox)
            while len(results) < len(states):
                key, output = self._next(mailbox)
                results[key] = output
                finished(output)
        except BaseException:
            self._abort(states)
            raise
        return [results[i] for i in range(len(states))]

    def stream(self, prepared: PreparedRequest) -> Iterator[RequestOutput]:
        """The outputs of one request, which starts at the first `next`; closing the iterator aborts it."""
        mailbox: Mailbox = deque()
        states: list[RequestState] = []
        try:
            states = self._add([prepared], mailbox)
            while True:
                _, output = self._next(mailbox)
                yield output
                if output.finished:
                    return
        finally:
            self._abort(states)

    def _add(self, prepared: Sequence[PreparedRequest], mailbox: Mailbox) -> list[RequestState]:
        with self._lock:
            self._check_open()
            states = [self._outputs.add(request, mailbox, i) for i, request in enumerate(prepared)]
            try:
                self._hand_over(prepared)
            except BaseException:
                self._abort(states)
                raise
            return states

    def _hand_over(self, prepared: Sequence[PreparedRequest]) -> None:
        """One by one: the engine may refuse a request for reasons of its own, and the message is to say which."""
        for i, request in enumerate(prepared):
            try:
                self.client.add([request.engine_request])
            except InvalidRequestError as error:
                if len(prepared) == 1:
                    raise
                message = f"prompts[{i}]: {error.message}"
                raise InvalidRequestError(message, param=error.param, hint=error.hint) from error

    def _next(self, mailbox: Mailbox) -> tuple[int, RequestOutput]:
        """The next output in `mailbox`; runs steps until there is one, its own or those of other threads."""
        while not mailbox:
            with self._lock:
                if not mailbox:
                    self._step()
        return mailbox.popleft()

    def _step(self) -> None:
        self._check_open()
        if not self.client.has_work():
            raise EngineError("the engine has nothing to do, but a request still waits for its end.")
        stopped = self._outputs.process(self.client.outputs())
        if stopped:
            self.client.abort_sequences(stopped)

    def _abort(self, states: Iterable[RequestState]) -> None:
        """Abort those of `states` that are unfinished."""
        with self._lock:
            ids = [state.prepared.engine_request.request_id for state in states if not state.finished]
            if ids and not self._closed:
                self._outputs.drop(ids)
                self.client.abort(ids)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine has been closed.")

    def close(self) -> None:
        """Abort everything and close the client."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.client.close()
