"""Runs requests on a client: hands them over, takes outputs to whoever waits for them, aborts what nobody wants."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from llmkit.engine.client import EngineClient
from llmkit.errors import EngineClosedError, EngineError, InvalidRequestError
from llmkit.frontend.input_processor import PreparedRequest
from llmkit.frontend.output_processor import OutputProcessor, RequestState
from llmkit.requests.output import RequestOutput

Mailbox = deque[tuple[int, RequestOutput]]
"""Outputs that their owner has not taken yet, each beside the number of its request; shared by the requests of one
owner."""


class RequestLoop:
    """Several callers may run requests at a time, in one thread (open streams) or in several.

    Whoever waits for an output runs the next step for all; `_lock` makes sure that only one does. It does not keep
    the thread that runs a step from coming back: the collector may close a forgotten stream at any moment, an
    extension may close one. Aborts of that kind wait in `_unwanted` for the end of the step.
    """

    def __init__(self, client: EngineClient, outputs: OutputProcessor) -> None:
        self.client = client
        self._outputs = outputs
        self._lock = threading.RLock()
        self._closed = False
        self._stepping = False
        self._unwanted: list[str] = []
        self._process = os.getpid()

    def run(
        self, prepared: Sequence[PreparedRequest], finished: Callable[[RequestOutput], None]
    ) -> list[RequestOutput]:
        """The final outputs of requests whose output_kind is FINAL_ONLY, in order. Calls `finished` for each as it
        ends. If interrupted, all of them are aborted."""
        mailbox: Mailbox = deque()
        results: dict[int, RequestOutput] = {}
        states: list[RequestState] = []
        self._check_process()
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
        self._check_process()
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
        states: list[RequestState] = []
        with self._lock:
            self._check_idle()
            try:
                for i, request in enumerate(prepared):
                    states.append(self._outputs.add(request, _into(mailbox, i)))
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
        self._check_idle()
        if not self.client.has_work():
            raise EngineError("the engine has nothing to do, but a request still waits for its end.")
        stopped: list[tuple[str, int]] = []
        try:
            self._stepping = True
            stopped = self._outputs.process(self.client.outputs())
            if stopped:
                self.client.abort_sequences(stopped)
        except BaseException as error:
            self._fail_all(error, stopped)
            raise
        finally:
            self._stepping = False
        if self._unwanted:
            unwanted, self._unwanted = self._unwanted, []
            self.client.abort(unwanted)

    def _fail_all(self, error: BaseException, stopped: Iterable[tuple[str, int]]) -> None:
        """A step was broken off (an interrupt from the keyboard): outputs may be lost, so nobody goes on."""
        ids = self._outputs.fail_all(f"The step was interrupted: {type(error).__name__}.")
        self._unwanted.clear()
        if not self._closed:
            self.client.abort([*ids, *(request_id for request_id, _ in stopped)])

    def _abort(self, states: Iterable[RequestState]) -> None:
        """Abort those of `states` that are unfinished."""
        with self._lock:
            ids = [state.prepared.engine_request.request_id for state in states if not state.finished]
            if not ids or self._closed:
                return
            self._outputs.drop(ids)
            if self._stepping:
                self._unwanted += ids
            else:
                self.client.abort(ids)

    def _check_process(self) -> None:
        """A fork has none of the threads that compute, and whatever lock one of them had stays locked for ever."""
        if os.getpid() != self._process:
            raise EngineError(
                f"this engine belongs to process {self._process}, of which this one is a fork.",
                hint='Make an LLM in each process, and start processes with multiprocessing\'s method "spawn".',
            )

    def _check_idle(self) -> None:
        self._check_open()
        if self._stepping:
            raise EngineError("the engine is in the middle of a step: nothing can be run from within it.")

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine has been closed.")

    def close(self) -> None:
        """Abort everything and close the client."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.client.close()


def _into(mailbox: Mailbox, number: int) -> Callable[[RequestState], None]:
    def notify(state: RequestState) -> None:
        if state.ready:
            mailbox.append((number, state.take()))

    return notify
