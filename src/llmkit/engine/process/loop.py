"""The step loop of the engine process: takes in what the parent wants, runs steps, sends what they bring."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import zmq

from llmkit.engine.async_client import refusal
from llmkit.engine.idle_transfers import IdleTransfers
from llmkit.engine.process import messages
from llmkit.engine.process.messages import (
    Abort,
    AbortSequences,
    Add,
    Call,
    EngineSummary,
    Outputs,
    Result,
    Stop,
    ToChild,
)
from llmkit.engine.process.pulse import Pulse
from llmkit.engine.utilities import UNBOUNDED
from llmkit.errors import InvalidRequestError
from llmkit.requests.message import EngineOutput, EngineRequest

if TYPE_CHECKING:
    from llmkit.engine.process.plan_record import PlanRecorder
    from llmkit.engine.stats import EngineStats
    from llmkit.scheduling.plan import StepPlan

logger = logging.getLogger("llmkit.engine.process")

IDLE_WAIT_S = 1.0
"""Longest wait for a message: `stopping` may be set meanwhile."""

MAX_BROKEN_STEPS = 3
"""So many calls of `step` in a row may raise; each ends the requests that were under way. Then the process gives up."""


class Core(Protocol):
    """The part of EngineCore that the loop uses. on_plan: to be called with every plan before it is run."""

    on_plan: Any

    def add(self, request: EngineRequest) -> None: ...
    def abort(self, request_ids: Iterable[str]) -> None: ...
    def abort_sequence(self, request_id: str, index: int) -> None: ...
    def has_work(self) -> bool: ...
    def step(self) -> list[EngineOutput]: ...
    def has_transfers(self) -> bool: ...
    def step_transfers(self) -> bool: ...
    def stats(self) -> EngineStats: ...


class EngineLoop:
    """Owns the two sockets of the main thread. `engine` has a `core`; `run_utility(method, arguments)` runs a call."""

    def __init__(
        self,
        engine: Any,
        run_utility: Any,
        inbox: zmq.Socket[bytes],
        outbox: zmq.Socket[bytes],
        pulse: Pulse,
        record: PlanRecorder,
    ) -> None:
        self._core: Core = engine.core
        self._run_utility = run_utility
        self._inbox = inbox
        self._outbox = outbox
        self._pulse = pulse
        self._record = record
        self._idle = IdleTransfers(self._core)
        self._seen = 0
        self._num_tokens = 0
        self._num_broken = 0
        self.stopping = False
        self._core.on_plan = self._note_plan

    def run(self) -> None:
        """Until the parent says stop, or `stopping` is set. Raises what `step` raises again and again."""
        while not self.stopping:
            self._take_in()
            if not self.stopping:
                self._advance()

    def _advance(self) -> None:
        if self._core.has_work():
            self._idle.busy()
            self._step()
        else:
            with self._pulse.doing("transfers"):
                self._idle.run()

    def _take_in(self) -> None:
        """Everything that has arrived; without work, wait for it or until the connector needs a step."""
        if not self._core.has_work():
            self._record.clear()
            seconds = self._idle.seconds_left()
            if not self._inbox.poll(math.ceil(1000 * min(IDLE_WAIT_S, IDLE_WAIT_S if seconds is None else seconds))):
                return
        batch: list[ToChild] = []
        while True:
            try:
                batch.append(messages.decode_to_child(self._inbox.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
        self._seen += len(batch)
        if batch:
            added = [request for message in batch if isinstance(message, Add) for request in message.requests]
            self._record.take_in([request.request_id for request in added])
            with self._pulse.doing("taking in requests"):
                self._apply(batch)

    def _apply(self, batch: list[ToChild]) -> None:
        """Aborts first: a request that was aborted before it was taken in never is."""
        waiting: dict[str, EngineRequest] = {}
        refused: list[EngineOutput] = []
        calls: list[Call] = []
        for message in batch:
            match message:
                case Add(requests):
                    for request in requests:
                        if request.request_id in waiting:
                            refused += self._add(waiting.pop(request.request_id))
                        waiting[request.request_id] = request
                case Abort(request_ids):
                    for request_id in request_ids:
                        waiting.pop(request_id, None)
                    self._core.abort(request_ids)
                case AbortSequences(sequences):
                    for request_id, index in sequences:
                        if request_id in waiting:
                            refused += self._add(waiting.pop(request_id))
                        self._core.abort_sequence(request_id, index)
                case Call():
                    calls.append(message)
                case Stop():
                    self.stopping = True
                    return
        for request in waiting.values():
            refused += self._add(request)
        if refused:
            self._send(Outputs(self._seen, refused))
        for call in calls:
            self._answer(call)

    def _add(self, request: EngineRequest) -> list[EngineOutput]:
        """Nothing, or the outputs that tell of a refusal."""
        try:
            self._core.add(request)
        except Exception as error:
            if not isinstance(error, InvalidRequestError):
                logger.exception("request %s could not be added", request.request_id)
            return refusal(request, error)
        return []

    def _answer(self, call: Call) -> None:
        with self._pulse.doing(call.method, bounded=call.method not in UNBOUNDED):
            try:
                value = messages.dumped(self._run_utility(call.method, messages.loaded(call.arguments)))
                result = Result(call.number, value, failed=False)
            except Exception as error:
                result = Result(call.number, messages.dumped_error(error), failed=True)
        self._send(result)

    def _step(self) -> None:
        start = perf_counter()
        try:
            with self._pulse.doing("step"):
                outputs = self._core.step()
        except Exception:
            # The core has ended every request with an error, and tells it with the next step.
            self._num_broken += 1
            if self._num_broken >= MAX_BROKEN_STEPS:
                raise
            logger.exception("a step was broken off")
            return
        self._num_broken = 0
        if outputs or self._num_tokens:
            self._send(Outputs(self._seen, outputs, self._summary(perf_counter() - start)))

    def _summary(self, step_s: float) -> EngineSummary:
        stats, num_tokens = self._core.stats(), self._num_tokens
        self._num_tokens = 0
        return EngineSummary(
            num_steps=stats.num_steps,
            num_tokens=num_tokens,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            kv_usage=stats.kv_usage,
            num_preemptions=stats.num_preemptions,
            prefix_query_tokens=stats.prefix_query_tokens,
            prefix_hit_tokens=stats.prefix_hit_tokens,
            step_s=step_s,
        )

    def _note_plan(self, plan: StepPlan) -> None:
        self._num_tokens += plan.num_tokens
        self._record.note(plan.requests)

    def _send(self, message: messages.FromChild) -> None:
        """Never waits: the queue has no limit, and what is in it is bounded by the tokens that requests may have."""
        self._outbox.send(messages.encode(message), zmq.NOBLOCK)
