"""Kind `executor`: starts the workers, carries the calls to them and brings the results back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from llmkit.hookspecs.markers import hookspec

if TYPE_CHECKING:
    from pydantic import BaseModel

    from llmkit.execution.setup import WorkerReport, WorkerSetup
    from llmkit.kv_cache.layout import KVCacheLayout
    from llmkit.scheduling.plan import StepPlan, StepResult


class StepHandle(Protocol):
    """A step that has been submitted."""

    def result(self) -> StepResult:
        """Wait for the step and return what it sampled. Raises what the step raised."""
        ...


class Executor(ABC):
    """Runs steps on one or more workers. Used by the engine's step loop only.

    `max_concurrent_steps` > 1 allows the core to plan and submit step n+1 before step n's result is known.
    Steps are executed in the order in which they were submitted.
    """

    max_concurrent_steps: int = 1

    @abstractmethod
    def start(self, setup: WorkerSetup) -> WorkerReport:
        """Load the weights, measure, and say how many KV blocks fit; nothing is allocated for them yet.

        Raises ModelError, OutOfMemoryError."""

    @abstractmethod
    def allocate(self, layout: KVCacheLayout) -> None:
        """Create the KV cache as `layout` says."""

    @abstractmethod
    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step."""

    @abstractmethod
    def close(self) -> None:
        """Stop the workers and free what they hold. May be called twice."""


@hookspec(firstresult=True)
def llmkit_executor(options: BaseModel | None) -> Executor:  # type: ignore[empty-body]
    """Build the executor. `options` is an instance of `info.options`, validated; None if there is none.

    .. versionadded:: 0.1
    """
