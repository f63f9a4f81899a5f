"""What a request returns to its user, and what observers are told when it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from llmkit.requests.logprobs import PositionLogprobs
from llmkit.requests.message import FinishReason


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` answers.

    cumulative_logprob: sum over the answer's tokens. logprobs: one entry per token. None unless asked for.
    stop_reason: the stop string or stop token id that ended the answer; None for end-of-sequence and length.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened, in seconds of `time.monotonic()`; None until they do. num_preemptions: of all sequences
    of the request together."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """The state of a request: all of it, the news, or the end, as `SamplingParams.output_kind` says.

    prompt: the text, if there was one. prompt_logprobs: one entry per prompt token, None for the first.
    num_cached_tokens: prompt tokens that the prefix cache held, or a connector has loaded. kv_transfer_params: what the
    connector wants the client to have, of the first sequence that ended with any.
    error: what went wrong, with finish reason "error"; error_param: the field of the request that is to blame;
    overloaded: the engine had no room for it in time, it may be sent again.
    embedding: of the prompt, as the model made it, for a request that asked for one.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    metrics: RequestMetrics | None = None
    lora_request: Any = None
    num_cached_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    error: str | None = None
    error_param: str | None = None
    overloaded: bool = False
    embedding: list[float] | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of one prompt. num_cached_tokens: prompt tokens that the prefix cache held."""

    request_id: str
    embedding: list[float]
    num_prompt_tokens: int
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """What an observer learns about a request that has ended; sums over its `n` sequences.

    finish_reasons: one per sequence, by index. errors: messages of the sequences that ended with "error".
    """

    request_id: str
    user: str | None
    priority: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    finish_reasons: tuple[FinishReason, ...]
    metrics: RequestMetrics
    errors: tuple[str, ...] = field(default=())
