"""Builds the halves of all members. Each is guarded as the core guards a connector, so that one which fails does not
take the others with it."""

from __future__ import annotations

from collections.abc import Sequence

from llmkit.execution.worker_transfers import WorkerTransfers
from llmkit.hookspecs.connector import Connector, SchedulerContext, WorkerContext
from llmkit.registry.breaker import Breaker
from llmkit.scheduling.guarded_connector import GuardedConnector
from llmkit_connectors.multi.scheduler_half import MultiScheduler
from llmkit_connectors.multi.worker_half import MultiWorker


class MultiConnector(Connector):
    """members: name and connector, in order."""

    def __init__(self, members: Sequence[tuple[str, Connector]]) -> None:
        self._members = tuple(members)

    def scheduler_half(self, context: SchedulerContext) -> MultiScheduler:
        return MultiScheduler(
            context,
            [
                GuardedConnector(connector.scheduler_half(context), Breaker("connector", name), context.new_id)
                for name, connector in self._members
            ],
        )

    def worker_half(self, context: WorkerContext) -> MultiWorker:
        halves = [(name, connector.worker_half(context)) for name, connector in self._members]
        return MultiWorker(halves, WorkerTransfers)
