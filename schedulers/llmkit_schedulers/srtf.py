"""Shortest remaining answer first, with aging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.hookspecs.scheduler import RequestView, SchedulerPolicy
from llmkit_schedulers.ordered_queue import OrderedPolicy


class SrtfOptions(BaseModel):
    """Options of the srtf policy."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    aging_tokens_per_s: float = Field(
        default=50.0,
        gt=0,
        allow_inf_nan=False,
        description="How many tokens shorter a request counts for each second since its arrival.",
    )
    longest_tokens: int = Field(
        default=2048, ge=1, description="Answers expected to be longer than this, in tokens, count as this long."
    )
    hint: Annotated[str, Field(min_length=1)] = Field(
        default="expected_tokens",
        description="Key of extra_args whose value says how many tokens the answer will probably have.",
    )


info = PluginInfo(
    summary="shortest remaining answer first, by max_tokens or a hint, with aging; the longest yields",
    options=SrtfOptions,
)


class SrtfPolicy(OrderedPolicy):
    """Fewest remaining output tokens first: what the hint in the request says, else max_tokens, less what it has got.

    A request counts as shorter the longer ago it arrived. `now` is the same for all, so the order is that of
    remaining + aging x arrival time, which does not change while a request waits; and since no answer counts as longer
    than `longest_tokens`, nobody is overtaken by who arrives longest_tokens / aging seconds later.
    """

    def __init__(self, options: SrtfOptions | None = None) -> None:
        super().__init__()
        self._options = options or SrtfOptions()
        self.starvation_bound_s = self._options.longest_tokens / self._options.aging_tokens_per_s

    def key(self, request: RequestView) -> float:
        return self.remaining(request) + request.arrival_time * self._options.aging_tokens_per_s

    def remaining(self, request: RequestView) -> float:
        """Output tokens that are probably still to come; at least 1."""
        expected: float = request.max_tokens
        hint = request.extra_args.get(self._options.hint)
        if isinstance(hint, (int, float)) and not isinstance(hint, bool) and hint >= 0:
            expected = min(expected, hint)
        return min(max(expected - request.num_output_tokens, 1), self._options.longest_tokens)

    def victim(self, running: Sequence[RequestView], needing: RequestView) -> RequestView | None:  # noqa: ARG002
        return max(running, key=lambda request: (self.key(request), request.sequence_number))


@hookimpl
def llmkit_scheduler_policy(options: SrtfOptions | None) -> SchedulerPolicy:
    return SrtfPolicy(options)
