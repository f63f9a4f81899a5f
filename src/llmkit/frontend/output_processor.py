"""Tokens from the engine to what users see: text without half characters, stop strings, log-probabilities."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from llmkit.errors import described
from llmkit.frontend.answer import Answer
from llmkit.frontend.input_processor import PreparedRequest
from llmkit.frontend.logprob_text import with_decoded_tokens
from llmkit.frontend.tokenizer import Tokenizer
from llmkit.metrics.record import RequestRecord
from llmkit.metrics.requests import RequestTotals
from llmkit.requests.logprobs import PositionLogprobs
from llmkit.requests.message import EngineOutput, FinishReason
from llmkit.requests.output import RequestMetrics, RequestOutput
from llmkit.requests.sampling_params import OutputKind

logger = logging.getLogger("llmkit.frontend")


@dataclass
class RequestState:
    """One request's answers so far. `notify` is called with it after every step that has told something of it.

    Its owner takes what is `ready` when it likes; what has come since the last time is taken together. preemptions: by
    sequence, of those that were preempted.
    """

    prepared: PreparedRequest
    notify: Callable[[RequestState], None]
    answers: list[Answer]
    kind: OutputKind
    metrics: RequestMetrics
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    preemptions: dict[int, int] = field(default_factory=dict)
    kv_transfer_params: dict[str, Any] | None = None
    error: str | None = None
    error_param: str | None = None
    overloaded: bool = False
    embedding: list[float] | None = None
    prompt_counted: bool = False

    @property
    def finished(self) -> bool:
        for answer in self.answers:  # noqa: SIM110 - asked for every request of every step
            if answer.finish_reason is None:
                return False
        return True

    @property
    def started(self) -> bool:
        """Whether the engine has told of any token or end."""
        return any(answer.num_tokens or answer.finish_reason is not None for answer in self.answers)

    @property
    def ready(self) -> bool:
        """Whether there is something to take."""
        if self.kind is OutputKind.FINAL_ONLY and not self.finished:
            return False
        return any(answer.has_news for answer in self.answers)

    def take(self) -> RequestOutput:
        """What `kind` asks for: what is new, or everything so far. It is not new any more then."""
        prepared = self.prepared
        if self.kind is OutputKind.DELTA:
            completions = [answer.news() for answer in self.answers if answer.has_news]
        else:
            completions = [answer.whole() for answer in self.answers]
        return RequestOutput(
            request_id=prepared.request_id,
            prompt=prepared.prompt,
            prompt_token_ids=prepared.engine_request.prompt_token_ids,
            outputs=completions,
            finished=self.finished,
            prompt_logprobs=self.prompt_logprobs,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
            kv_transfer_params=self.kv_transfer_params,
            error=self.error,
            error_param=self.error_param,
            overloaded=self.overloaded,
            embedding=self.embedding,
        )

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """End every answer that has not ended; nobody is notified."""
        self.error = self.error or error
        for answer in self.answers:
            answer.end(reason)

    def record(self, reason: FinishReason = "abort", error: str | None = None) -> RequestRecord:
        """The request as it has ended. reason: of answers that were cut off; error: what its reader is told then."""
        prepared, answers = self.prepared, self.answers
        request = prepared.engine_request
        spans = [(answer.first_token_time, answer.last_token_time) for answer in answers]
        return RequestRecord(
            request_id=prepared.request_id,
            user=request.user,
            prompt=prepared.prompt,
            params=request.sampling_params,
            max_tokens=request.max_tokens,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_output_tokens=sum(answer.num_tokens for answer in answers),
            num_cached_tokens=self.num_cached_tokens,
            finish_reasons=tuple(answer.finish_reason or reason for answer in answers),
            metrics=self.metrics,
            num_intervals=sum(answer.num_tokens - 1 for answer in answers if answer.num_tokens),
            decode_s=sum(last - first for first, last in spans if first is not None and last is not None),
            error=error or self.error,
            trace_headers=prepared.trace_headers,
        )


class OutputProcessor:
    """Turns EngineOutputs into RequestOutputs. One owner of all requests that are under way.

    totals: counts their tokens; whoever ends requests counts the ends."""

    def __init__(self, tokenizer: Tokenizer | None, totals: RequestTotals | None = None) -> None:
        self._tokenizer = tokenizer
        self._totals = totals
        self._requests: dict[str, RequestState] = {}

    def __len__(self) -> int:
        """Requests under way."""
        return len(self._requests)

    def add(self, prepared: PreparedRequest, notify: Callable[[RequestState], None]) -> RequestState:
        """Expect outputs of this request; `notify` is called when there may be something to take."""
        request = prepared.engine_request
        params = request.sampling_params
        tokenizer = self._tokenizer if params.detokenize else None
        state = RequestState(
            prepared,
            notify,
            [Answer(i, request, tokenizer) for i in range(params.n)],
            params.output_kind,
            RequestMetrics(arrival_time=request.arrival_time),
        )
        self._requests[request.request_id] = state
        return state

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests (aborted by their user); later outputs of theirs are ignored."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def process(self, outputs: Iterable[EngineOutput]) -> list[tuple[str, int]]:
        """Apply a step's outputs. Returns the (request id, index) of sequences that a stop string has ended while
        the engine still runs them: they are to be aborted there. A request whose output cannot be made sense of
        fails alone."""
        now = time.monotonic()
        touched: dict[str, RequestState] = {}
        stopped: list[tuple[str, int]] = []
        for output in outputs:
            state = self._requests.get(output.request_id)
            if state is None or state.answers[output.index].finish_reason is not None:
                continue  # dropped, or ended by a stop string while this token was on its way
            touched[output.request_id] = state
            try:
                if self._apply(state, output, now):
                    stopped.append((output.request_id, output.index))
            except Exception as error:
                logger.exception("an output of request %r cannot be shown", state.prepared.request_id)
                running = [answer.index for answer in state.answers if answer.finish_reason is None]
                stopped += [(output.request_id, index) for index in running]
                state.end("error", f"The answer cannot be shown: {described(error)}")
        for request_id, state in touched.items():
            finished = state.finished
            if finished:
                state.metrics.finished_time = now
            state.notify(state)
            if finished:
                del self._requests[request_id]  # last: what an interrupt leaves here is ended by `fail_all`
        return stopped

    def fail_all(self, message: str) -> list[str]:
        """End every request with finish reason "error"; returns their ids in the engine."""
        ids = list(self._requests)
        while self._requests:
            _, state = self._requests.popitem()
            state.end("error", message)
            state.notify(state)
        return ids

    def _apply(self, state: RequestState, output: EngineOutput, now: float) -> bool:
        if output.num_cached_tokens > state.num_cached_tokens:
            state.num_cached_tokens = output.num_cached_tokens
        if output.first_scheduled_time is not None:
            state.metrics.first_scheduled_time = output.first_scheduled_time
        if output.num_preemptions:
            state.preemptions[output.index] = output.num_preemptions
            state.metrics.num_preemptions = sum(state.preemptions.values())
        if output.prompt_logprobs:
            state.prompt_logprobs = (state.prompt_logprobs or []) + [
                entry and with_decoded_tokens(entry, self._tokenizer) for entry in output.prompt_logprobs
            ]
        if state.kv_transfer_params is None:
            state.kv_transfer_params = output.kv_transfer_params
        if output.embedding is not None:
            state.embedding = output.embedding
        if output.error is not None:
            state.error, state.error_param = output.error, output.error_param
            state.overloaded = output.overloaded
        answer = state.answers[output.index]
        num_new = answer.apply(output)
        if num_new or output.finish_reason is not None:
            self._count(state, answer, num_new, now)
        return answer.finish_reason is not None and output.finish_reason is None

    def _count(self, state: RequestState, answer: Answer, num_new: int, now: float) -> None:
        """Note times and totals of `num_new` tokens that `answer` has got, or of its end."""
        metrics, totals = state.metrics, self._totals
        if totals is not None and not state.prompt_counted and answer.finish_reason != "error":
            state.prompt_counted = True
            totals.prompt_done(len(state.prepared.engine_request.prompt_token_ids), state.num_cached_tokens)
        if not num_new:
            return
        if totals is not None:
            if metrics.first_token_time is None:
                totals.first_token(now - metrics.arrival_time)
            last = answer.last_token_time
            totals.tokens(num_new, None if last is None else now - last)
        if answer.first_token_time is None:
            answer.first_token_time = now
            metrics.first_token_time = metrics.first_token_time or now
        answer.last_token_time = metrics.last_token_time = now
