"""By priority, lower is sooner, with optional aging."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.hookspecs.scheduler import RequestView, SchedulerPolicy
from llmkit_schedulers.ordered_queue import OrderedPolicy


class PriorityOptions(BaseModel):
    """Options of the priority policy."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    aging_s: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Seconds after which a waiting request counts as one priority level more urgent; default: never.",
    )
    aging_levels: int = Field(
        default=100,
        ge=0,
        description="With aging, priorities beyond so much above or below 0 count as that, so that nobody is overtaken "
        "by who arrives 2 x aging_levels x aging_s seconds later.",
    )


info = PluginInfo(
    summary="by the requests' priority (lower is sooner), with optional aging; the least urgent yields",
    options=PriorityOptions,
)


class PriorityPolicy(OrderedPolicy):
    """Lowest priority number first, then order of arrival.

    With aging, a request that arrived at time a has the urgency priority - (now - a) / aging_s. `now` is the same
    for all, so the order is that of priority + a / aging_s, which never changes. Priorities within +-aging_levels then
    differ by at most 2 aging_levels, which so many times aging_s seconds make up for.
    """

    def __init__(self, options: PriorityOptions | None = None) -> None:
        super().__init__()
        options = options or PriorityOptions()
        self._aging_s = options.aging_s
        self._levels = options.aging_levels
        if options.aging_s is not None:
            self.starvation_bound_s = 2 * options.aging_levels * options.aging_s

    def key(self, request: RequestView) -> float:
        if self._aging_s is None:
            return request.priority
        return max(-self._levels, min(request.priority, self._levels)) + request.arrival_time / self._aging_s

    def victim(self, running: Sequence[RequestView], needing: RequestView) -> RequestView | None:  # noqa: ARG002
        return max(running, key=lambda request: (self.key(request), request.sequence_number))


@hookimpl
def llmkit_scheduler_policy(options: PriorityOptions | None) -> SchedulerPolicy:
    return PriorityPolicy(options)
