"""What the requests of one frontend add up to. Nothing of it is lost when the engine is started again."""

from __future__ import annotations

from collections import Counter

from llmkit.metrics.histogram import NUM_ANSWERS, REQUEST_S, TOKEN_INTERVAL_S, TTFT_S, Histogram, token_bounds
from llmkit.metrics.record import RequestRecord


class RequestTotals:
    """Counters and histograms over requests. Used by the frontend's thread.

    A request counts once, whatever its `n`; tokens and their intervals count for each answer. finished: by finish
    reason of the request.
    """

    def __init__(self, max_model_len: int) -> None:
        self.prompt_tokens = 0
        self.prompt_tokens_cached = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        tokens = token_bounds(max_model_len)
        self.time_to_first_token = Histogram(TTFT_S)
        self.inter_token_latency = Histogram(TOKEN_INTERVAL_S)
        self.time_per_output_token = Histogram(TOKEN_INTERVAL_S)
        self.e2e_latency = Histogram(REQUEST_S)
        self.queue_time = Histogram(REQUEST_S)
        self.inference_time = Histogram(REQUEST_S)
        self.prefill_time = Histogram(REQUEST_S)
        self.decode_time = Histogram(REQUEST_S)
        self.num_prompt_tokens = Histogram(tokens)
        self.num_generation_tokens = Histogram(tokens)
        self.params_n = Histogram(NUM_ANSWERS)
        self.params_max_tokens = Histogram(tokens)

    def prompt_done(self, num_tokens: int, num_cached: int) -> None:
        """The prompt of a request has been computed, or what of it was not cached."""
        self.prompt_tokens += num_tokens
        self.prompt_tokens_cached += num_cached

    def tokens(self, count: int, seconds: float | None) -> None:
        """`count` more tokens of an answer, `seconds` after those before; None: they are its first."""
        self.generation_tokens += count
        if seconds is not None:
            self.inter_token_latency.observe(seconds)

    def first_token(self, seconds: float) -> None:
        """The first token of a request, `seconds` after its arrival."""
        self.time_to_first_token.observe(seconds)

    def ended(self, record: RequestRecord) -> None:
        """A request has ended, for whatever reason. Phases that it did not reach are not counted."""
        self.finished[record.finish_reason] += 1
        self.e2e_latency.observe(record.total_s)
        for histogram, seconds in (
            (self.queue_time, record.queue_s),
            (self.prefill_time, record.prefill_s),
            (self.decode_time, record.answer_s),
            (self.inference_time, record.inference_s),
            (self.time_per_output_token, record.token_s),
        ):
            if seconds is not None:
                histogram.observe(seconds)
        self.num_prompt_tokens.observe(record.num_prompt_tokens)
        self.num_generation_tokens.observe(record.num_output_tokens)
        self.params_n.observe(record.params.n)
        self.params_max_tokens.observe(record.max_tokens)
