from __future__ import annotations

import numpy as np
import pytest

from llmkit.errors import EngineClosedError
from llmkit.execution.step_handle import FinishedStep
from llmkit.scheduling.plan import StepPlan, StepResult
from llmkit_executors import inline
from llmkit_executors.inline_executor import InlineExecutor

EMPTY = np.zeros(0, dtype=np.int32)
PLAN = StepPlan(0, EMPTY, EMPTY, EMPTY, samples=np.zeros(0, dtype=np.bool_))


class FakeWorker:
    max_concurrent_steps = 2

    def __init__(self, setup: object) -> None:
        self.setup = setup
        self.calls: list[object] = []

    def load(self) -> str:
        return "report"

    def allocate(self, layout: object) -> None:
        self.calls.append(layout)

    def submit(self, plan: StepPlan) -> FinishedStep:
        self.calls.append(plan)
        if plan.step == 13:
            raise ValueError("thirteen")
        return FinishedStep(StepResult(EMPTY))

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def executor(monkeypatch) -> InlineExecutor:
    monkeypatch.setattr("llmkit_executors.inline_executor.Worker", FakeWorker)
    return inline.llmkit_executor(None)


def test_calls_reach_the_worker(executor):
    assert executor.start("setup") == "report"
    assert executor.max_concurrent_steps == 2
    worker = executor._worker
    executor.allocate("layout")
    assert executor.submit(PLAN).result().token_ids is EMPTY
    executor.close()
    executor.close()
    assert worker.calls == ["layout", PLAN, "close"]


def test_what_a_step_raises_comes_with_its_result(executor):
    executor.start("setup")
    bad = StepPlan(13, EMPTY, EMPTY, EMPTY, samples=np.zeros(0, dtype=np.bool_))
    handle = executor.submit(bad)
    with pytest.raises(ValueError, match="thirteen"):
        handle.result()
    assert executor.submit(PLAN).result().token_ids is EMPTY


def test_a_closed_executor_says_so(executor):
    with pytest.raises(EngineClosedError):
        executor.submit(PLAN)
    executor.start("setup")
    executor.close()
    with pytest.raises(EngineClosedError):
        executor.allocate("layout")


def test_a_gpu_takes_a_step_ahead(executor):
    assert [executor.concurrent_steps(device) for device in ("cpu", "cuda", "cuda:1")] == [1, 2, 2]
