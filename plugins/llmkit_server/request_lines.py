"""A line in the log for every request that has ended."""

from __future__ import annotations

import logging
from typing import Any

from llmkit.metrics.record import RequestRecord

logger = logging.getLogger("llmkit.server.requests")


class RequestLines:
    """For `AsyncLLM.on_request_ended`. show_prompt: the prompt's text, too, in the line's extra fields."""

    def __init__(self, *, show_prompt: bool) -> None:
        self._show_prompt = show_prompt

    def __call__(self, record: RequestRecord) -> None:
        """Ids, tokens, times in seconds, and how it ended; what users have written only if that was asked for."""
        fields: dict[str, Any] = {
            "request_id": record.request_id,
            "prompt_tokens": record.num_prompt_tokens,
            "cached_tokens": record.num_cached_tokens,
            "output_tokens": record.num_output_tokens,
            "finish_reason": record.finish_reason,
            "seconds": _rounded(record.total_s),
            "first_token_s": _rounded(record.first_token_s),
            "queue_s": _rounded(record.queue_s),
            "preemptions": record.metrics.num_preemptions,
        }
        if record.error is not None:
            fields["error"] = record.error
        if self._show_prompt and record.prompt is not None:
            fields["prompt"] = record.prompt
        first = "-" if record.first_token_s is None else f"{record.first_token_s:.3f} s"
        logger.info(
            "%s: %s, %d prompt tokens (%d cached), %d output tokens, first after %s, %.3f s%s",
            record.request_id,
            record.finish_reason,
            record.num_prompt_tokens,
            record.num_cached_tokens,
            record.num_output_tokens,
            first,
            record.total_s,
            f", prompt {record.prompt!r}" if "prompt" in fields else "",
            extra=fields,
        )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
