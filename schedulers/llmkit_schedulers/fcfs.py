"""First come, first served."""

from __future__ import annotations

from collections.abc import Sequence

from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.hookspecs.scheduler import RequestView, SchedulerPolicy
from llmkit_schedulers.ordered_queue import OrderedPolicy

info = PluginInfo(summary="first come, first served; the youngest yields when memory is short", rank=10)


class FcfsPolicy(OrderedPolicy):
    """Order of arrival. A preempted request is older than those that have never run, so it comes before them."""

    starvation_bound_s = 0.0

    def key(self, request: RequestView) -> float:  # noqa: ARG002 - the tie-break is the order
        return 0.0

    def victim(self, running: Sequence[RequestView], needing: RequestView) -> RequestView | None:  # noqa: ARG002
        return max(running, key=lambda request: request.sequence_number)


@hookimpl
def llmkit_scheduler_policy() -> SchedulerPolicy:
    return FcfsPolicy()
