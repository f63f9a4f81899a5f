"""The scheduler half of a connector as the core sees it: every answer checked, every exception a fault and no more."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, TypeVar

from llmkit.errors import described, shown
from llmkit.hookspecs.connector import (
    LoadOffer,
    Retention,
    SchedulerConnector,
    StepView,
    TransferPlan,
    TransferReport,
    TransferView,
)
from llmkit.registry.breaker import Breaker
from llmkit.registry.timings import CallTiming

logger = logging.getLogger("llmkit.scheduling")

T = TypeVar("T")
D = TypeVar("D")

NOTHING = LoadOffer(0)
"""The offer of no load."""


class GuardedConnector:
    """`breaker` counts what is wrong with the connector; while it is open, nothing is loaded and nothing stored, but
    the connector still hears what becomes of requests.

    new_id: the source of ids that the connector was given. calls: by name of the connector's method, its calls and
    their time; a dictionary of the caller's to add to.
    """

    def __init__(
        self,
        half: SchedulerConnector,
        breaker: Breaker,
        new_id: Callable[[], int],
        calls: dict[str, CallTiming] | None = None,
    ) -> None:
        self.breaker = breaker
        self.new_id = new_id
        self._half = half
        self._calls = {} if calls is None else calls
        self._may_hold_stale = False

    def problems(self, params: Mapping[str, Any]) -> list[str]:
        """What the connector finds wrong with a new request's parameters."""
        answer = self._call("problems", lambda: [str(problem) for problem in self._half.problems(params)], None)
        return ["The connector failed to check them."] if answer is None else answer

    def offer(self, request: TransferView, num_computed_tokens: int, block_size: int) -> LoadOffer | None:
        """How much can be loaded, in whole blocks and no more than leaves a token to compute. None: ask again."""
        if self._may_hold_stale or self.breaker.open:
            return NOTHING
        offer: object = self._call("offer", lambda: self._half.offer(request, num_computed_tokens), NOTHING)
        if offer is None or offer is NOTHING:
            return NOTHING if offer is NOTHING else None
        if not isinstance(offer, LoadOffer) or not _is_whole_blocks(offer.num_tokens, block_size):
            self.fault(f"offer() returned {shown(offer)}: not a LoadOffer of whole blocks of {block_size} tokens")
            return NOTHING
        longest = (request.num_tokens - 1) // block_size * block_size - num_computed_tokens
        num_tokens = max(0, min(offer.num_tokens, longest))
        return LoadOffer(num_tokens, bool(offer.asynchronous)) if num_tokens else NOTHING

    def plan_transfers(self, step: StepView) -> TransferPlan | None:
        """What the workers are to do; None also if the connector failed to say."""
        if self.breaker.open:
            return None

        def planned() -> TransferPlan | None:
            plan: object = self._half.plan_transfers(step)
            if plan is None:
                return None
            if not isinstance(plan, TransferPlan):
                raise TypeError(f"it returned {shown(plan)}, which is no TransferPlan")
            return TransferPlan(plan.payload, {hold: tuple(blocks) for hold, blocks in plan.holds.items()})

        return self._call("plan_transfers", planned, None)

    def request_finished(self, request: TransferView, block_ids: tuple[tuple[int, ...], ...]) -> Retention:
        """What is kept of a sequence that has ended."""

        def kept() -> Retention:
            answer: object = self._half.request_finished(request, block_ids)
            if not isinstance(answer, Retention):
                raise TypeError(f"it returned {shown(answer)}, which is no Retention")
            return Retention(tuple(answer.holds), None if answer.params is None else dict(answer.params))

        return self._call("request_finished", kept, Retention())

    def has_more_to_store(self) -> bool:
        """Whether the connector would store more once a hold is over."""
        if self.breaker.open:
            return False
        return self._call("has_more_to_store", lambda: bool(self._half.has_more_to_store()), False)

    def preempted(self, request: TransferView) -> None:
        """A sequence has lost its blocks."""
        self._call("preempted", lambda: self._half.preempted(request), None)

    def update(self, report: TransferReport) -> None:
        """What the workers have reported."""
        self._call("update", lambda: self._half.update(report), None)

    def stats(self) -> dict[str, float]:
        """The connector's own numbers."""

        def numbers() -> dict[str, float]:
            return {str(name): float(number) for name, number in self._half.stats().items()}

        return self._call("stats", numbers, {})

    def reset(self) -> None:
        """Nothing that is stored may be offered any more. If the connector fails in this, it is never asked again."""

        def tell() -> bool:
            self._half.reset()
            return True

        self._may_hold_stale |= not self._call("reset", tell, False)

    def close(self) -> None:
        """The engine closes."""
        self._call("close", self._half.close, None)

    def fault(self, what: str) -> None:
        """Count something that is wrong with the connector."""
        if not self.breaker.num_faults:
            logger.warning(
                "the connector %r is at fault: %s. Further faults are only counted.", self.breaker.name, what
            )
        self.breaker.record(what)

    def _call(self, name: str, call: Callable[[], T], default: D) -> T | D:
        timing = self._calls.get(name) or self._calls.setdefault(name, CallTiming())
        start = perf_counter()
        try:
            return call()
        except Exception as error:
            self.fault(f"{name}() failed: {described(error)}")
            return default
        finally:
            timing.add(perf_counter() - start)


def _is_whole_blocks(num_tokens: object, block_size: int) -> bool:
    return type(num_tokens) is int and num_tokens >= 0 and not num_tokens % block_size
