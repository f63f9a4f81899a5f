"""What crosses the border between the frontend and the engine core. Encodable with msgspec.

Neither kind can be part of a reference cycle, and thousands are made a second: `gc=False` keeps them from the garbage
collector, whose passes over them would be the longest steps of a busy engine.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from llmkit.requests.grammar_task import GrammarTask
from llmkit.requests.logprobs import PositionLogprobs
from llmkit.requests.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
Pooling = Literal["last", "mean"]


class PriorOutput(msgspec.Struct, frozen=True, gc=False):
    """What one sequence of a request had produced when its engine died. finish_reason: None if it is to go on."""

    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A validated request on its way to the engine core.

    request_id: unique within the engine (the frontend makes it so). sampling_params.seed is always set (drawn
    by the frontend if the user gave none). stop_token_ids: every id that ends the answer, end-of-sequence ids
    included unless ignored; eos_token_ids: those of them for which stop_reason is None. bad_words_ids: token
    sequences that must not appear. arrival_time: seconds, time.monotonic().
    grammar: what constrains the text; None if nothing does.
    prior_outputs: what an earlier engine has produced, one entry for each sequence, or none at all; every sequence that
    has not ended goes on after its tokens. num_prior_prompt_logprobs: prompt positions whose entries it has told.
    kv_transfer_params: for the connector. pooling: the prompt's embedding is wanted, made of its last hidden state or
    the mean of all; max_tokens is 0 then.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    arrival_time: float = 0.0
    priority: int = 0
    user: str | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    grammar: GrammarTask | None = None
    prior_outputs: tuple[PriorOutput, ...] = ()
    num_prior_prompt_logprobs: int = 0
    pooling: Pooling | None = None


class EngineOutput(msgspec.Struct, kw_only=True, gc=False):
    """News of one sequence after a step.

    index: which of the request's `n` sequences. new_token_ids: tokens appended in this step.
    logprobs: one entry per new token, if asked for. prompt_logprobs: entries for the prompt positions that this
    step completed, in order (the first position of a prompt has None). num_cached_tokens: prompt tokens taken
    from the prefix cache, fixed at the first admission. error: message, with finish_reason "error"; error_param: the
    field of the request that is to blame, None if none is; overloaded: the engine had no room for it in time, so it may
    be sent again. last_token_is_text: the answer ended because its text is complete, so the last token belongs to it
    although finish_reason is "stop". first_scheduled_time: when the request first entered a step, seconds of
    time.monotonic(); only beside a sequence's first token and at some ends. num_preemptions: of this sequence, so far.
    kv_transfer_params: what the connector wants the client to have, with the end of a sequence. embedding: of the
    prompt, with its end.
    """

    request_id: str
    index: int
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    error_param: str | None = None
    overloaded: bool = False
    last_token_is_text: bool = False
    first_scheduled_time: float | None = None
    num_preemptions: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    embedding: list[float] | None = None


def refusal_outputs(request: EngineRequest, error: str, param: str | None) -> list[EngineOutput]:
    """How a request that is not even taken in is told: every sequence of it has ended with `error`."""
    return [
        EngineOutput(
            request_id=request.request_id,
            index=index,
            new_token_ids=[],
            finish_reason="error",
            error=error,
            error_param=param,
        )
        for index in range(request.sampling_params.n)
    ]
