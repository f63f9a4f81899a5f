"""Runs every call where it is made. On the CPU a step is done when `submit` returns; on a GPU it has been launched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmkit.errors import EngineClosedError
from llmkit.execution.model_runners import concurrent_steps
from llmkit.execution.setup import WorkerReport, WorkerSetup
from llmkit.execution.worker import Worker
from llmkit.hookspecs.executor import Executor, StepHandle
from llmkit.kv_cache.layout import KVCacheLayout
from llmkit.scheduling.plan import StepPlan, StepResult


@dataclass(frozen=True)
class FailedStep:
    """A step that could not be started, and what it raised."""

    error: Exception

    def result(self) -> StepResult:
        raise self.error


class InlineExecutor(Executor):
    """One worker. What a step raises is raised by its handle, not by `submit`."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    def start(self, setup: WorkerSetup) -> WorkerReport:
        self.close()
        self._worker = Worker(setup)
        self.max_concurrent_steps = self._worker.max_concurrent_steps
        return self._worker.load()

    def allocate(self, layout: KVCacheLayout) -> None:
        self._running().allocate(layout)

    def concurrent_steps(self, device: str) -> int:
        return concurrent_steps(device.partition(":")[0])

    def submit(self, plan: StepPlan) -> StepHandle:
        worker = self._running()
        try:
            return worker.submit(plan)
        except Exception as error:
            return FailedStep(error)

    def settle(self) -> None:
        if self._worker is not None:
            self._worker.settle()

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
