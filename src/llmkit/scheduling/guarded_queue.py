"""The waiting queue as the core sees it: the policy's order, checked against a record of the core's own.

A policy may raise, forget requests, return ones that do not wait or were never given to it, or take its time. Every
such fault is counted and answered with arrival order or the contract's default, so that no request is lost whatever it
does. After repeated faults it is not asked for a while; when it is again, it is told what it has missed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TypeVar

import numpy as np

from llmkit.errors import PluginError, described, shown
from llmkit.hookspecs.scheduler import Load, SchedulerPolicy
from llmkit.registry.breaker import Breaker
from llmkit.registry.timings import CallTiming
from llmkit.requests.request import Request, View

logger = logging.getLogger("llmkit.scheduling")

T = TypeVar("T")
D = TypeVar("D")

_FAILED = object()
"""In place of an answer where the policy raised: that is a fault already."""


SLOW_CALL_S = 1.0
"""A call of the policy that takes longer than this, in seconds, is a fault: all requests wait for it."""


class GuardedQueue:
    """Requests that wait, in the order of `policy`.

    calls: by name of the policy's method, its calls and their time; a dictionary of the caller's to add to. breaker:
    counts the faults, and says when the policy is not to be asked. clock: seconds, to time the calls with.
    swaps: whether the policy wants preempted requests swapped out instead of computed again. wants_served: whether it
    wants to be told of what steps have done.

    Raises PluginError for a policy that preempts in a way the core does not know.
    """

    def __init__(
        self,
        policy: SchedulerPolicy,
        calls: dict[str, CallTiming] | None = None,
        breaker: Breaker | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        preemption = getattr(policy, "preemption", "recompute")
        if preemption not in ("recompute", "swap"):
            raise PluginError(
                f"the scheduling policy {type(policy).__name__} asks for preemption {shown(preemption)}; "
                'the core can preempt by "recompute" and by "swap".'
            )
        self.swaps = preemption == "swap"
        self._policy = policy
        self._calls = {} if calls is None else calls
        self.breaker = breaker or Breaker("scheduler", type(policy).__name__)
        self._clock = clock
        self._waiting: dict[View, Request] = {}
        self._told: dict[View, None] = {}
        """Those that wait as far as the policy has been told."""
        self._behind = False
        """Whether the policy has not been told everything."""
        self._faults_seen: set[str] = set()
        self.wants_served = getattr(type(policy), "served", SchedulerPolicy.served) is not SchedulerPolicy.served
        self.mixes_prefill_and_decode = bool(getattr(policy, "mixes_prefill_and_decode", True))

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request.view in self._waiting

    @property
    def num_faults(self) -> int:
        """Answers of the policy that had to be replaced, and calls that took too long."""
        return self.breaker.num_faults

    def add(self, request: Request) -> None:
        """A request waits for the first time."""
        self._waiting[request.view] = request
        self._tell("add", self._policy.add, request.view)

    def requeue(self, request: Request) -> None:
        """A preempted request waits again."""
        self._waiting[request.view] = request
        self._tell("requeue", self._policy.requeue, request.view)

    def remove(self, request: Request) -> None:
        """A request waits no longer, without having entered."""
        if self._waiting.pop(request.view, None) is not None:
            self._tell("remove", self._policy.remove, request.view)

    def clear(self) -> None:
        """Nobody waits any longer."""
        for request in list(self._waiting.values()):
            self.remove(request)

    def peek(self) -> Request | None:
        """The request that should enter next: the policy's, or the one that waits longest if that makes no sense."""
        if not self._waiting:
            return None
        if not self._asked():
            return self._first_arrival()
        view = self._call("peek", self._policy.peek, _FAILED)
        request = self._known(view)
        if request is None:
            if view is not _FAILED:
                self._fault("peek", f"returned {shown(view)}, which does not wait, while {len(self)} do")
            if isinstance(view, View):
                self._tell("remove", self._policy.remove, view)
            request = self._first_arrival()
        return request

    def pop(self, request: Request) -> None:
        """`request`, the one that `peek` has returned, enters."""
        del self._waiting[request.view]
        if not self._asked():
            return
        view = self._call("pop", self._policy.pop, _FAILED)
        if view is request.view:
            self._told.pop(request.view, None)
            return
        if view is not _FAILED:
            self._fault("pop", f"returned {shown(view)} instead of {request.view!r}")
        self._tell("remove", self._policy.remove, request.view)
        other = self._known(view)
        if other is not None:
            self._tell("add", self._policy.add, other.view)

    def victim(self, running: Sequence[Request], needing: Request) -> Request:
        """Which of `running` (oldest admission first, includes `needing`) gives up its blocks."""
        if not self._asked():
            return running[-1]
        views = [request.view for request in running]
        view = self._call("victim", lambda: self._policy.victim(tuple(views), needing.view), None)
        for request in running:
            if request.view is view:
                return request
        if view is not None:
            self._fault("victim", f"returned {shown(view)}, which does not run")
        return running[-1]

    def admit(self, request: Request, load: Load) -> bool:
        if not self._asked():
            return True
        answer: object = self._call("admit", lambda: self._policy.admit(request.view, load), True)
        if not isinstance(answer, (bool, np.bool_)):  # a forgotten `return` would keep everybody out
            self._fault("admit", f"returned {shown(answer)}, neither True nor False")
            return True
        return bool(answer)

    def chunk(self, request: Request, offered: int) -> int:
        """How many of `offered` prompt tokens to compute now, within 1..offered."""
        if not self._asked():
            return offered
        answer = self._call("chunk", lambda: int(self._policy.chunk(request.view, offered)), offered)
        if not 1 <= answer <= offered:
            self._fault("chunk", f"returned {shown(answer)}, outside 1..{offered}")
            return min(max(answer, 1), offered)
        return answer

    def served(self, views: list[View], num_prompt_tokens: list[int], num_output_tokens: list[int]) -> None:
        """What a step has done, for a policy that wants to know."""
        if views and self._asked():
            self._call("served", lambda: self._policy.served(views, num_prompt_tokens, num_output_tokens), None)

    def _known(self, view: object) -> Request | None:
        return self._waiting.get(view) if isinstance(view, View) else None

    def _first_arrival(self) -> Request:
        return min(self._waiting.values(), key=lambda request: request.view.sequence_number)

    def _asked(self) -> bool:
        """Whether the policy may be called now; if it may again after a pause, it is told first what has changed."""
        if self.breaker.open:
            self._behind = True
            return False
        if self._behind:
            self._behind = False
            for view in [view for view in self._told if view not in self._waiting]:
                self._tell("remove", self._policy.remove, view)
            for view in [view for view in self._waiting if view not in self._told]:
                self._tell("add", self._policy.add, view)
            return not self.breaker.open
        return True

    def _tell(self, name: str, call: Callable[[View], None], view: View) -> None:
        """Let the policy know of a change."""
        if not self._asked():
            return
        if name == "remove":
            self._told.pop(view, None)
        else:
            self._told[view] = None
        self._call(name, lambda: call(view), None)

    def _call(self, name: str, call: Callable[[], T], default: D) -> T | D:
        timing = self._calls.get(name) or self._calls.setdefault(name, CallTiming())
        start = self._clock()
        try:
            return call()
        except Exception as error:
            self._fault(name, f"raised {described(error)}")
            return default
        finally:
            seconds = self._clock() - start
            timing.add(seconds)
            if seconds > SLOW_CALL_S:
                self._fault(name, f"took {seconds:.1f} s")

    def _fault(self, name: str, what: str) -> None:
        self.breaker.record(f"{name}() {what}")
        if name not in self._faults_seen:
            self._faults_seen.add(name)
            logger.warning(
                "the scheduling policy %s is at fault: %s() %s. The core goes on without its answer; "
                "further faults of %s() are only counted.",
                type(self._policy).__name__, name, what, name,
            )  # fmt: skip
