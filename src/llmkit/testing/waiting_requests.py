"""Requests as a scheduling policy sees them, made by hand: for testing a policy without an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmkit.hookspecs.scheduler import RequestView, SchedulerPolicy


@dataclass(eq=False)
class FakeRequestView:
    """A `RequestView` whose fields can be set."""

    sequence_number: int
    priority: int = 0
    arrival_time: float = 0.0
    user: str | None = None
    index: int = 0
    num_prompt_tokens: int = 1
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    max_tokens: int = 16
    extra_args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def request_id(self) -> str:
        return f"request-{self.sequence_number}"

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


def drain(policy: SchedulerPolicy) -> list[RequestView]:
    """Take out all requests that wait, in order. Raises AssertionError if `peek`, `pop` and `len` disagree."""
    order = []
    while (view := policy.peek()) is not None:
        before = len(policy)
        assert policy.pop() is view, "pop() returned another request than peek()"
        assert len(policy) == before - 1, f"len() is {len(policy)} after pop(), {before} before"
        order.append(view)
    assert len(policy) == 0, f"peek() returned None but len() is {len(policy)}"
    return order
