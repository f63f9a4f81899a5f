"""The waiting queue as the core sees it: the policy's order, checked against a record of the core's own.

A policy may raise, forget requests, return ones that do not wait or were never given to it. Every such fault is
counted and answered with arrival order or the contract's default, so that no request is lost whatever it does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TypeVar

from llmkit.errors import PluginError, described, shown
from llmkit.hookspecs.scheduler import Load, SchedulerPolicy
from llmkit.registry.timings import CallTiming
from llmkit.requests.request import Request, View

logger = logging.getLogger("llmkit.scheduling")

T = TypeVar("T")


class GuardedQueue:
    """Requests that wait, in the order of `policy`. `num_faults`: answers of the policy that had to be replaced.
    calls: by name of the policy's method, its calls and their time; a dictionary of the caller's to add to.

    Raises PluginError for a policy that preempts in a way the core does not know.
    """

    def __init__(self, policy: SchedulerPolicy, calls: dict[str, CallTiming] | None = None) -> None:
        preemption = getattr(policy, "preemption", "recompute")
        if preemption != "recompute":
            raise PluginError(
                f"the scheduling policy {type(policy).__name__} asks for preemption {preemption!r}; "
                'the core can only preempt by "recompute".'
            )
        self._policy = policy
        self._calls = {} if calls is None else calls
        self._waiting: dict[View, Request] = {}
        self._faults_seen: set[str] = set()
        self.num_faults = 0
        self.mixes_prefill_and_decode = bool(getattr(policy, "mixes_prefill_and_decode", True))

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request.view in self._waiting

    def add(self, request: Request) -> None:
        """A request waits for the first time."""
        self._waiting[request.view] = request
        self._call("add", lambda: self._policy.add(request.view), None)

    def requeue(self, request: Request) -> None:
        """A preempted request waits again."""
        self._waiting[request.view] = request
        self._call("requeue", lambda: self._policy.requeue(request.view), None)

    def remove(self, request: Request) -> None:
        """A request waits no longer, without having entered."""
        if self._waiting.pop(request.view, None) is not None:
            self._call("remove", lambda: self._policy.remove(request.view), None)

    def clear(self) -> None:
        """Nobody waits any longer."""
        for request in list(self._waiting.values()):
            self.remove(request)

    def peek(self) -> Request | None:
        """The request that should enter next: the policy's, or the one that waits longest if that makes no sense."""
        if not self._waiting:
            return None
        view = self._call("peek", self._policy.peek, None)
        request = self._known(view)
        if request is None:
            self._fault("peek", f"returned {shown(view)}, which does not wait, while {len(self)} do")
            if isinstance(view, View):
                self._call("remove", lambda: self._policy.remove(view), None)
            request = next(iter(self._waiting.values()))
        return request

    def pop(self, request: Request) -> None:
        """`request`, the one that `peek` has returned, enters."""
        view = self._call("pop", self._policy.pop, None)
        del self._waiting[request.view]
        if view is request.view:
            return
        self._fault("pop", f"returned {shown(view)} instead of {request.view!r}")
        self._call("remove", lambda: self._policy.remove(request.view), None)
        other = self._known(view)
        if other is not None:
            self._call("add", lambda: self._policy.add(other.view), None)

    def victim(self, running: Sequence[Request], needing: Request) -> Request:
        """Which of `running` (oldest admission first, includes `needing`) gives up its blocks."""
        views = [request.view for request in running]
        view = self._call("victim", lambda: self._policy.victim(tuple(views), needing.view), None)
        for request in running:
            if request.view is view:
                return request
        if view is not None:
            self._fault("victim", f"returned {shown(view)}, which does not run")
        return running[-1]

    def admit(self, request: Request, load: Load) -> bool:
        return bool(self._call("admit", lambda: bool(self._policy.admit(request.view, load)), True))

    def chunk(self, request: Request, offered: int) -> int:
        """How many of `offered` prompt tokens to compute now, within 1..offered."""
        answer = self._call("chunk", lambda: int(self._policy.chunk(request.view, offered)), offered)
        if not 1 <= answer <= offered:
            self._fault("chunk", f"returned {shown(answer)}, outside 1..{offered}")
            return min(max(answer, 1), offered)
        return answer

    def _known(self, view: object) -> Request | None:
        return self._waiting.get(view) if isinstance(view, View) else None

    def _call(self, name: str, call: Callable[[], T], default: T) -> T:
        timing = self._calls.get(name) or self._calls.setdefault(name, CallTiming())
        start = perf_counter()
        try:
            return call()
        except Exception as error:
            self._fault(name, f"raised {described(error)}")
            return default
        finally:
            timing.add(perf_counter() - start)

    def _fault(self, name: str, what: str) -> None:
        self.num_faults += 1
        if name not in self._faults_seen:
            self._faults_seen.add(name)
            logger.warning(
                "the scheduling policy %s is at fault: %s() %s. The core goes on without its answer; "
                "further faults of %s() are only counted.",
                type(self._policy).__name__, name, what, name,
            )  # fmt: skip
