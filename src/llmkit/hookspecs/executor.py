"""Kind `executor`: starts the workers, carries the calls to them and brings the results back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from llmkit.errors import EngineError
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

    def concurrent_steps(self, device: str) -> int:
        """What `max_concurrent_steps` will be once workers run on `device`; asked before `start`."""
        return self.max_concurrent_steps

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

    def settle(self) -> None:  # noqa: B027 - nothing to wait for where `submit` does it all
        """Wait for all steps under way; what they sampled may be lost. Called when an interrupt from the keyboard has
        struck while a step was submitted, so that its handle may be in nobody's hands."""

    def sleep(self, level: int) -> None:
        """Give back the KV cache and, at level 2 or where the workers' device is not the host, the weights. No step is
        under way, and the batch is empty afterwards. By default raises EngineError: not possible."""
        raise EngineError(f"{type(self).__name__} cannot give back memory; level 0 pauses the engine.")

    def wake_up(self, part: str) -> None:
        """Get back "weights" or "kv_cache", the weights first, as they were at the start; nothing happens to what was
        not given back. Raises as `start` and `allocate` do."""
        raise EngineError(f"{type(self).__name__} has nothing to wake up: {part}.")

    def start_profile(self, folder: str) -> None:
        """Record what the workers do, for a file in `folder`. Raises EngineError; by default: not possible."""
        raise EngineError(f"{type(self).__name__} cannot record profiles.")

    def stop_profile(self) -> str:
        """Write the recording; its path. Raises EngineError."""
        raise EngineError("no profile is being recorded.")

    @abstractmethod
    def close(self) -> None:
        """Stop the workers and free what they hold. May be called twice."""


@hookspec(firstresult=True)
def llmkit_executor(options: BaseModel | None) -> Executor:  # type: ignore[empty-body]
    """Build the executor. `options` is an instance of `info.options`, validated; None if there is none.

    .. versionadded:: 0.1
    """
