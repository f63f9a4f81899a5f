"""The handle of a step that has been run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmkit.scheduling.plan import StepResult


@dataclass(frozen=True)
class FinishedStep:
    """A step that was done when it was submitted."""

    outcome: StepResult

    def result(self) -> StepResult:
        return self.outcome
