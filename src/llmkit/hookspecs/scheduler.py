"""Kind `scheduler`: who goes first, who yields, who enters, and how much of a prompt is done at a time.

The policy owns the order of the waiting queue and answers three questions. It never sees the core's own state:
requests come as read-only views, and whatever it returns or raises is checked by the core, which falls back to
arrival order, so a policy can neither lose a request nor overrun the budget.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from llmkit.hookspecs.markers import hookspec

if TYPE_CHECKING:
    from pydantic import BaseModel


class RequestView(Protocol):
    """Read-only, live view of a request; the same object for the whole life of the request, and hashable.

    It keeps the request in memory: what a policy keeps of requests that it has popped belongs into a
    `weakref.WeakKeyDictionary`, as nobody tells it of their ends.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def priority(self) -> int:
        """Lower is sooner."""
        ...

    @property
    def arrival_time(self) -> float:
        """Seconds, `time.monotonic()` of the engine process; ties are broken by `sequence_number`."""
        ...

    @property
    def sequence_number(self) -> int:
        """Position in the order of arrival, unique."""
        ...

    @property
    def user(self) -> str | None:
        """Key for fairness between users, if the request carries one."""
        ...

    @property
    def index(self) -> int:
        """Which of the request's `n` answers; the first one computes the prompt for all."""
        ...

    @property
    def extra_args(self) -> Mapping[str, Any]:
        """`SamplingParams.extra_args`, unchecked: whatever the request's author has put there for plugins."""
        ...

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values the engine has; while the request waits: 0, unless it was swapped out."""
        ...

    @property
    def num_output_tokens(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Load:
    """How full the engine is when `admit` is asked. Block counts are in allocation blocks."""

    num_running: int
    max_num_seqs: int
    num_waiting: int
    token_budget_left: int
    num_free_blocks: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class ServiceBound:
    """A claim about what users are served, which the conformance suite checks.

    Service is counted in weighted tokens: `prompt_token` for each token of a prompt when its request first enters,
    `output_token` for each token of an answer when it is there, divided by the user's weight (1 unless `weights` says
    so). most_apart: while two users both have requests waiting, what they get in that time differs by no more.
    most_ahead: between the arrival of a request whose user had none waiting or running and its entering, each other
    user that has requests waiting all the time gets no more than this on average.
    """

    prompt_token: float
    output_token: float
    most_apart: float
    most_ahead: float
    weights: Mapping[str, float] = field(default_factory=dict)


class SchedulerPolicy(ABC):
    """The waiting queue and three choices. Called from the engine's step loop only, never concurrently.

    `preemption` says what happens to a victim's blocks: "recompute" (freed, computed again) or "swap" (copied to host
    memory and back; where there is no room for them, computed again).
    `mixes_prefill_and_decode = False` keeps prefill chunks and decode tokens in different steps, prefill first.
    `starvation_bound_s` is a claim that the conformance suite checks: no request that arrived more than so many seconds
    after one that waits enters before it, whatever they are like. None: no such claim.
    """

    preemption: Literal["recompute", "swap"] = "recompute"
    mixes_prefill_and_decode: bool = True
    starvation_bound_s: float | None = None

    @abstractmethod
    def add(self, request: RequestView) -> None:
        """A new request waits."""

    @abstractmethod
    def peek(self) -> RequestView | None:
        """The request that should enter next, None if none waits. Changes nothing."""

    @abstractmethod
    def pop(self) -> RequestView:
        """Remove and return what `peek` would return. Raises IndexError if none waits."""

    @abstractmethod
    def remove(self, request: RequestView) -> None:
        """A waiting request was aborted; unknown requests are ignored."""

    def requeue(self, request: RequestView) -> None:
        """A request that was popped waits again: it was preempted, or its blocks have been loaded meanwhile. By default
        it is added, a policy may put it first."""
        self.add(request)

    @abstractmethod
    def __len__(self) -> int:
        """How many wait."""

    def victim(self, running: Sequence[RequestView], needing: RequestView) -> RequestView | None:
        """Which of `running` (oldest first, includes `needing`) gives up its blocks so that `needing` can go on.

        Returning `needing` preempts it itself; None means the core's choice: the last one of `running`.
        """
        return running[-1] if running else None

    def admit(self, request: RequestView, load: Load) -> bool:
        """Whether `request` may enter now. If the engine is idle, the core admits it whatever is answered."""
        return True

    def chunk(self, request: RequestView, offered: int) -> int:
        """How many of the `offered` prompt tokens to compute in this step, 1..offered; values outside are clipped."""
        return offered

    def service_bound(self, longest_prompt: int, batch_tokens: int) -> ServiceBound | None:
        """What this policy claims about the shares of users. None: nothing.

        longest_prompt: tokens of the longest prompt. batch_tokens: what the requests that run at a time may come to at
        their ends, prompts and answers.
        """
        return None

    def served(  # noqa: B027 - need not be defined
        self, requests: Sequence[RequestView], num_prompt_tokens: Sequence[int], num_output_tokens: Sequence[int]
    ) -> None:
        """What a step has done: once after each step, for all of its requests that got anything.

        Of each, how many prompt tokens were computed (again, after a preemption by recompute; never those that were
        found in the cache) and how many output tokens it got. A policy that does not define this costs nothing.
        """


@hookspec(firstresult=True)
def llmkit_scheduler_policy(options: BaseModel | None) -> SchedulerPolicy:  # type: ignore[empty-body]
    """Build the scheduling policy. `options` is an instance of `info.options`, validated; None if there is none.

    .. versionadded:: 0.1
    """
