"""Builds the halves of all members. Each is guarded as the core guards a connector, so that one which fails does not
take the others with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from llmkit.execution.worker_transfers import WorkerTransfers
from llmkit.hookspecs.connector import Connector, SchedulerContext, WorkerContext
from llmkit.scheduling.guarded_connector import GuardedConnector
from llmkit_connectors.multi.scheduler_half import MultiScheduler
from llmkit_connectors.multi.worker_half import MultiWorker


class MultiConnector(Connector):
    """members: name and connector, in order."""

    def __init__(self, members: Sequence[tuple[str, Connector]]) -> None:
        self._members = tuple(members)

    def scheduler_half(self, context: SchedulerContext) -> MultiScheduler:
        share = replace(context, held_share=context.held_share / len(self._members))
        number: Counter[str] = Counter()
        members = []
        for name, connector in self._members:
            number[name] += 1
            breaker = context.breaker_of(name, number[name])
            members.append(GuardedConnector(connector.scheduler_half(share), breaker, context.new_id))
        return MultiScheduler(context, members)

    def worker_half(self, context: WorkerContext) -> MultiWorker:
        return MultiWorker([connector.worker_half(context) for _, connector in self._members], WorkerTransfers)
