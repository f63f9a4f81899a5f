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
        None,
        gt=0,
        allow_inf_nan=False,
        description="Seconds after which a waiting request counts as one priority level more urgent; default: never.",
    )


info = PluginInfo(
    summary="by the requests' priority (lower is sooner), with optional aging; the least urgent yields",
    options=PriorityOptions,
)


class PriorityPolicy(OrderedPolicy):
    """Lowest priority number first, then order of arrival.

    With aging, a request that arrived at time a has the urgency priority - (now - a) / aging_s. `now` is the same
    for all, so the order is that of priority + a / aging_s, which never changes.
    """

    def __init__(self, aging_s: float | None = None) -> None:
        super().__init__()
        self._levels_per_second = 0.0 if aging_s is None else 1.0 / aging_s

    def key(self, request: RequestView) -> float:
        return request.priority + request.arrival_time * self._levels_per_second

    def victim(self, running: Sequence[RequestView], needing: RequestView) -> RequestView | None:  # noqa: ARG002
        return max(running, key=lambda request: (self.key(request), request.sequence_number))


@hookimpl
def llmkit_scheduler_policy(options: PriorityOptions | None) -> SchedulerPolicy:
    return PriorityPolicy(options.aging_s if options else None)
