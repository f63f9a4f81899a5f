"""Runs every call where it is made: a step is done when `submit` returns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmkit.errors import EngineClosedError
from llmkit.execution.setup import WorkerReport, WorkerSetup
from llmkit.execution.worker import Worker
from llmkit.hookspecs.executor import Executor
from llmkit.kv_cache.layout import KVCacheLayout
from llmkit.scheduling.plan import StepPlan, StepResult


@dataclass(frozen=True)
class DoneStep:
    """A step that has been run: what it returned, or what it raised."""

    outcome: StepResult | Exception

    def result(self) -> StepResult:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class InlineExecutor(Executor):
    """One worker, one step at a time. What a step raises is raised by its handle, not by `submit`."""

    max_concurrent_steps = 1

    def __init__(self) -> None:
        self._worker: Worker | None = None

    def start(self, setup: WorkerSetup) -> WorkerReport:
        self.close()
        self._worker = Worker(setup)
        return self._worker.load()

    def allocate(self, layout: KVCacheLayout) -> None:
        self._running().allocate(layout)

    def submit(self, plan: StepPlan) -> DoneStep:
        worker = self._running()
        try:
            return DoneStep(worker.execute(plan))
        except Exception as error:
            return DoneStep(error)

    def sleep(self, level: int) -> None:
        self._running().sleep(level)

    def wake_up(self, part: str) -> None:
        self._running().wake_up(part)

    def start_profile(self, folder: str) -> None:
        self._running().profile.start(Path(folder))

    def stop_profile(self) -> str:
        return str(self._running().profile.stop())

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _running(self) -> Worker:
        if self._worker is None:
            raise EngineClosedError("The executor is closed, or was never started.")
        return self._worker
