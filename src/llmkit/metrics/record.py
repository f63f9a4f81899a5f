"""A request that has ended, as its frontend saw it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmkit.requests.message import FinishReason
from llmkit.requests.output import RequestMetrics
from llmkit.requests.sampling_params import SamplingParams

_WORST_FIRST: tuple[FinishReason, ...] = ("error", "abort", "length", "stop")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """request_id: the user's. prompt: its text, if there was one. finish_reasons: one per answer; error: why it failed.
    metrics: its times. num_output_tokens: of all answers; num_intervals, decode_s: how many tokens followed another
    one of the same answer, and the seconds from first to last token, both summed over the answers. trace_headers: of
    the trace that the request belongs to.
    """

    request_id: str
    user: str | None
    prompt: str | None
    params: SamplingParams
    max_tokens: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    finish_reasons: tuple[FinishReason, ...]
    metrics: RequestMetrics
    num_intervals: int = 0
    decode_s: float = 0.0
    error: str | None = None
    trace_headers: Mapping[str, str] | None = None

    @property
    def finish_reason(self) -> FinishReason:
        """Of the request: "error" if any answer failed, else "abort" if any was aborted, else "length" before
        "stop"."""
        return min(self.finish_reasons, key=_WORST_FIRST.index)

    @property
    def queue_s(self) -> float | None:
        """Seconds until it entered a step for the first time; None if it never did."""
        return _between(self.metrics.arrival_time, self.metrics.first_scheduled_time)

    @property
    def prefill_s(self) -> float | None:
        """Seconds from there to the first token."""
        return _between(self.metrics.first_scheduled_time, self.metrics.first_token_time)

    @property
    def answer_s(self) -> float | None:
        """Seconds from the first to the last token."""
        return _between(self.metrics.first_token_time, self.metrics.last_token_time)

    @property
    def inference_s(self) -> float | None:
        """Seconds from its first step to the last token."""
        return _between(self.metrics.first_scheduled_time, self.metrics.last_token_time)

    @property
    def first_token_s(self) -> float | None:
        """Seconds from its arrival to the first token."""
        return _between(self.metrics.arrival_time, self.metrics.first_token_time)

    @property
    def total_s(self) -> float:
        """Seconds from its arrival to its end."""
        return _between(self.metrics.arrival_time, self.metrics.finished_time) or 0.0

    @property
    def token_s(self) -> float | None:
        """Seconds that each token after an answer's first has taken; None if there was none."""
        return self.decode_s / self.num_intervals if self.num_intervals else None


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)
