"""Tokens from the engine to what users see: text without half characters, stop strings, log-probabilities."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from llmkit.frontend.answer import Answer
from llmkit.frontend.input_processor import PreparedRequest
from llmkit.frontend.logprob_text import with_decoded_tokens
from llmkit.frontend.tokenizer import Tokenizer
from llmkit.requests.logprobs import PositionLogprobs
from llmkit.requests.message import EngineOutput
from llmkit.requests.output import CompletionOutput, RequestMetrics, RequestOutput
from llmkit.requests.sampling_params import OutputKind

Mailbox = deque[tuple[int, RequestOutput]]
"""Outputs that their owner has not taken yet; shared by the requests of one owner."""


@dataclass
class RequestState:
    """One request's answers so far. Outputs go to `mailbox`, beside the `key` that its owner knows the request by.

    preemptions: by sequence, of those that were preempted.
    """

    prepared: PreparedRequest
    mailbox: Mailbox
    key: int
    answers: list[Answer]
    kind: OutputKind
    metrics: RequestMetrics
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    preemptions: dict[int, int] = field(default_factory=dict)
    kv_transfer_params: dict[str, Any] | None = None
    error: str | None = None
    error_param: str | None = None

    @property
    def finished(self) -> bool:
        return all(answer.finish_reason is not None for answer in self.answers)


class OutputProcessor:
    """Turns EngineOutputs into RequestOutputs. One owner of all requests that are under way."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, RequestState] = {}

    def __len__(self) -> int:
        """Requests under way."""
        return len(self._requests)

    def add(self, prepared: PreparedRequest, mailbox: Mailbox, key: int = 0) -> RequestState:
        """Expect outputs of this request and put them into `mailbox`, beside `key`."""
        request = prepared.engine_request
        params = request.sampling_params
        tokenizer = self._tokenizer if params.detokenize else None
        state = RequestState(
            prepared,
            mailbox,
            key,
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
        the engine still runs them: they are to be aborted there."""
        now = time.monotonic()
        touched: dict[str, RequestState] = {}
        stopped: list[tuple[str, int]] = []
        for output in outputs:
            state = self._requests.get(output.request_id)
            if state is None or state.answers[output.index].finish_reason is not None:
                continue  # dropped, or ended by a stop string while this token was on its way
            touched[output.request_id] = state
            if self._apply(state, output, now):
                stopped.append((output.request_id, output.index))
        for request_id, state in touched.items():
            if state.finished:
                state.metrics.finished_time = now
            self._emit(state)
            if state.finished:
                del self._requests[request_id]  # last: what an interrupt leaves here is ended by `fail_all`
        return stopped

    def fail_all(self, message: str) -> list[str]:
        """End every request with finish reason "error"; returns their ids in the engine."""
        ids = list(self._requests)
        while self._requests:
            _, state = self._requests.popitem()
            state.error = state.error or message
            for answer in state.answers:
                answer.fail()
            self._emit(state)
        return ids

    def _apply(self, state: RequestState, output: EngineOutput, now: float) -> bool:
        state.num_cached_tokens = max(state.num_cached_tokens, output.num_cached_tokens)
        if output.first_scheduled_time is not None:
            state.metrics.first_scheduled_time = output.first_scheduled_time
        if output.num_preemptions:
            state.preemptions[output.index] = output.num_preemptions
            state.metrics.num_preemptions = sum(state.preemptions.values())
        if output.prompt_logprobs:
            state.prompt_logprobs = (state.prompt_logprobs or []) + [
                entry and with_decoded_tokens(entry, self._tokenizer) for entry in output.prompt_logprobs
            ]
        if output.new_token_ids:
            state.metrics.first_token_time = state.metrics.first_token_time or now
            state.metrics.last_token_time = now
        if state.kv_transfer_params is None:
            state.kv_transfer_params = output.kv_transfer_params
        if output.error is not None:
            state.error, state.error_param = output.error, output.error_param
        answer = state.answers[output.index]
        answer.apply(output)
        return answer.finish_reason is not None and output.finish_reason is None

    def _emit(self, state: RequestState) -> None:
        finished = state.finished
        if state.kind is OutputKind.FINAL_ONLY and not finished:
            return
        if state.kind is OutputKind.DELTA:
            answers = [answer.news() for answer in state.answers if answer.has_news]
        else:
            answers = [answer.whole() for answer in state.answers]
        if not finished and not any(completion.token_ids for completion in answers):
            return
        state.mailbox.append((state.key, self._request_output(state, answers, finished)))

    def _request_output(self, state: RequestState, answers: list[CompletionOutput], finished: bool) -> RequestOutput:
        prepared = state.prepared
        return RequestOutput(
            request_id=prepared.request_id,
            prompt=prepared.prompt,
            prompt_token_ids=prepared.engine_request.prompt_token_ids,
            outputs=answers,
            finished=finished,
            prompt_logprobs=state.prompt_logprobs,
            metrics=state.metrics,
            num_cached_tokens=state.num_cached_tokens,
            kv_transfer_params=state.kv_transfer_params,
            error=state.error,
            error_param=state.error_param,
        )
