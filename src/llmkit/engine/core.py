"""The engine core: requests in, outputs out, one step at a time."""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from llmkit.engine.sleeping import Sleeper
from llmkit.engine.stats import EngineStats, StepStats, StepSummary
from llmkit.errors import EngineClosedError, EngineError, described, is_out_of_memory
from llmkit.hookspecs.executor import Executor, StepHandle
from llmkit.metrics.histogram import STEP_TOKENS, Histogram
from llmkit.metrics.step_parts import part
from llmkit.registry.breakers import Breakers
from llmkit.registry.timings import CallTiming
from llmkit.requests.message import EngineOutput, EngineRequest
from llmkit.scheduling.plan import StepPlan, StepResult
from llmkit.scheduling.scheduler import Scheduler

logger = logging.getLogger("llmkit.engine")

GRAMMAR_WAIT_S = 0.02
"""Seconds that a step waits for grammars when there is nothing else to do."""

RESET_WAIT_S = 2.0
"""Seconds that a reset of the prefix cache waits for transfers."""

CLOSE_WAIT_S = 5.0
"""Seconds that closing waits for what could not be stored at once."""


RECENT_STEPS = 512
"""Steps whose summaries are kept."""


@dataclass(slots=True)
class _Submitted:
    """A step on its way. handle: None if the executor refused it at once, with `error`, or if an interrupt struck
    before it could be noted down."""

    plan: StepPlan
    handle: StepHandle | None
    error: Exception | None
    plan_s: float


class EngineCore:
    """Runs the step loop. All methods are called from one thread.

    observers: objects with `llmkit_step_finished(stats=…)` and `llmkit_request_finished(request=…)`, both optional;
    what they raise is logged and goes no further. executor_calls: takes count and time of the executor's `submit`.
    breakers: those of the plugins that are guarded; the scheduling policy's is added.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        observers: Sequence[object] = (),
        executor_calls: dict[str, CallTiming] | None = None,
        breakers: Breakers | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        calls = {} if executor_calls is None else executor_calls
        self._submissions = calls.setdefault("submit", CallTiming())
        self._breakers = breakers or Breakers()
        self._breakers.add(scheduler.queue.breaker)
        self._depth = max(1, min(scheduler.max_concurrent_steps, executor.max_concurrent_steps))
        self._in_flight: deque[_Submitted] = deque()
        self._on_step = _hooks(observers, "llmkit_step_finished")
        self._on_finished = _hooks(observers, "llmkit_request_finished")
        self._num_steps = 0
        self._num_failed_steps = 0
        self._num_out_of_memory = 0
        self._broken_off: str | None = None
        self._closed = False
        self.sleeper = Sleeper(scheduler, executor)
        self.recent_steps: deque[StepSummary] = deque(maxlen=RECENT_STEPS)
        self.engine_id = uuid.uuid4().hex
        self.step_tokens = Histogram(STEP_TOKENS)
        self.on_plan: Callable[[StepPlan], None] | None = None
        """Told of every plan before it is carried out."""

    def add(self, request: EngineRequest) -> None:
        """Take in a request. Raises InvalidRequestError if it can never be served or its id is in use."""
        self._check_open()
        self._recover()
        self.scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests now, wherever they are. No output tells of it: the caller knows.

        Unknown and finished ids are ignored. An id can be used again at once.
        """
        self.scheduler.abort(request_ids)
        self._tell_finished()

    def abort_sequence(self, request_id: str, index: int) -> None:
        """`abort` for one of a request's sequences; the others go on."""
        self.scheduler.abort([request_id], index)
        self._tell_finished()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell. Requests of an engine that sleeps wait."""
        if self.sleeper.parts:
            return self.scheduler.has_news
        return bool(self.scheduler.num_unfinished or self._in_flight or self._broken_off)

    def step(self) -> list[EngineOutput]:
        """Plan and submit until the pipeline is full, wait for the oldest step, apply its result.

        Returns what is new, an empty list if nothing is. A step that fails ends its requests with finish reason
        "error"; the engine goes on. If this raises (an interrupt from the keyboard), nobody knows how far the step
        got: every unfinished request ends so, and is told with the next outputs.
        """
        self._check_open()
        self._recover()
        if self.sleeper.parts:
            return self.scheduler.take_news()
        try:
            return self._advance()
        except BaseException as error:
            self._break_off(error)
            raise

    def launch(self) -> None:
        """Plan and submit until the pipeline is full, if steps are launched ahead of results: the next `step` would do
        it first. For whoever has something else to do before that, such as telling of outputs, which would leave the
        device without work. Raises as `step` does; does nothing once closed."""
        if self._depth == 1 or self._closed or self.sleeper.parts:
            return
        self._recover()
        try:
            self._fill_pipeline()
        except BaseException as error:
            self._break_off(error)
            raise

    def sleep(self, level: int) -> None:
        """See `Sleeper`. Steps under way are finished first."""
        self._check_open()
        while self._in_flight:
            self.scheduler.tell(self._land())
        self.sleeper.sleep(level)

    def _land(self) -> list[EngineOutput]:
        """Wait for the oldest step and apply its result."""
        submitted = self._in_flight[0]
        start = time.perf_counter()
        result = self._wait(submitted)
        self._in_flight.popleft()
        waited = time.perf_counter()
        outputs = self._update(submitted.plan, result)
        plan = submitted.plan
        if plan.num_rows:
            scheduler = self.scheduler
            budget, running, waiting = scheduler.token_budget.limit, len(scheduler.running), len(scheduler.queue)
            self.recent_steps.append(StepSummary(plan.step, time.time(), plan.num_tokens, budget, running, waiting))
            if self._on_step:
                self._tell_step(submitted, result, waited - start, time.perf_counter() - waited)
        return outputs

    def _advance(self) -> list[EngineOutput]:
        self._fill_pipeline()
        outputs = self.scheduler.take_news()  # tokens of late grammars: before what the step lands behind them
        if self._in_flight:
            outputs += self._land()
        outputs += self.scheduler.take_news()
        if not outputs and not self._in_flight:
            self.scheduler.grammars.wait(GRAMMAR_WAIT_S)
        self._tell_finished()
        self._send_off_transfers()
        return outputs

    def _send_off_transfers(self) -> None:
        """With nothing left to compute nobody calls `step`: what the connector is to store must begin now."""
        if not self.scheduler.num_unfinished and not self._in_flight and self.scheduler.transfers.has_news:
            self._run_one_step()

    def _run_one_step(self) -> None:
        self._fill_pipeline()
        while self._in_flight:
            submitted = self._in_flight[0]
            result = self._wait(submitted)
            self._in_flight.popleft()
            self._update(submitted.plan, result)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, and those that a connector has stored; False, with nothing forgotten, while any
        request or transfer holds blocks. Waits a moment for transfers that nobody waits for."""
        self.settle_transfers(RESET_WAIT_S)
        return self.scheduler.reset_prefix_cache()

    def has_transfers(self) -> bool:
        """Whether, with nothing to compute, a connector has blocks under way or is to be told of some."""
        transfers = self.scheduler.transfers
        idle = not (self._closed or self.scheduler.num_unfinished or self._in_flight or self._broken_off)
        return idle and (transfers.holds_blocks or transfers.has_news)

    def step_transfers(self) -> bool:
        """One step for the connector alone, if `has_transfers`; whether it has brought anything. Raises as `step`."""
        if not self.has_transfers():
            return False
        transfers = self.scheduler.transfers
        before = transfers.num_under_way
        transfers.ask_workers()
        try:
            self._run_one_step()
        except BaseException as error:
            self._break_off(error)
            raise
        return transfers.has_news or transfers.num_under_way != before

    def settle_transfers(self, seconds: float) -> bool:
        """With no request unfinished, run steps for the connector alone until nothing is under way and nothing more is
        to be stored, at most so long; whether nothing is under way."""
        deadline = time.monotonic() + seconds
        while self.has_transfers() and time.monotonic() < deadline:
            self.step_transfers()
        return not self.scheduler.transfers.holds_blocks

    def stats(self) -> EngineStats:
        """A snapshot of the engine's numbers."""
        scheduler = self.scheduler
        kv = scheduler.manager.stats()
        loads = scheduler.transfers.counts
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.queue),
            num_compiling=len(scheduler.grammars),
            num_unfinished=scheduler.num_unfinished,
            num_steps=self._num_steps,
            num_failed_steps=self._num_failed_steps,
            num_out_of_memory=self._num_out_of_memory,
            sleep_level=self.sleeper.level,
            token_budget=scheduler.token_budget.limit,
            num_preemptions=scheduler.num_preemptions,
            num_loading=scheduler.transfers.num_waiting,
            num_loads=loads.num_loads,
            num_failed_loads=loads.num_failed_loads,
            external_query_tokens=scheduler.transfers.requests.query_tokens,
            external_hit_tokens=loads.hit_tokens,
            kv_usage=kv.usage,
            num_blocks=kv.num_blocks,
            num_free_blocks=kv.num_free,
            block_size=scheduler.manager.block_size,
            prefix_query_tokens=kv.prefix_query_tokens,
            prefix_hit_tokens=kv.prefix_hit_tokens,
            plugin_faults=self._breakers.counts(),
            num_swaps=scheduler.num_swaps,
            num_swaps_missed=scheduler.num_swaps_missed,
            num_host_blocks=kv.num_host_blocks,
            num_free_host_blocks=kv.num_free_host_blocks,
            connector=scheduler.transfers.stats(),
        )

    def close(self) -> None:
        """Stop the executor. Unfinished requests are gone. May be called twice. With none, waits a moment for what the
        connector still has to store."""
        if not self._closed:
            if self.scheduler.transfers.has_more_to_store:
                self.settle_transfers(CLOSE_WAIT_S)
            self._closed = True
            self._in_flight.clear()
            self.scheduler.close()
            self.executor.close()

    def _fill_pipeline(self) -> None:
        while len(self._in_flight) < self._depth:
            start = time.perf_counter()
            with part("plan"):
                plan = self.scheduler.plan()
            if plan is None:
                return
            if self.on_plan is not None:
                self.on_plan(plan)
            planned = time.perf_counter()
            submitted = _Submitted(plan, None, None, planned - start)
            self._in_flight.append(submitted)  # before it is: an interrupt may strike in between
            try:
                with part("submit"):
                    submitted.handle = self.executor.submit(plan)
            except Exception as raised:
                submitted.error = raised
            self._submissions.add(time.perf_counter() - planned)

    def _wait(self, submitted: _Submitted) -> StepResult | None:
        """The result of a step; None if it failed: its requests have been ended, or wait again if memory was short."""
        try:
            if submitted.handle is not None:
                with part("wait"):
                    result = submitted.handle.result()
                if isinstance(result, StepResult):
                    return result
                raise EngineError(f"the executor returned {type(result).__name__}, not a StepResult")
            error = submitted.error or EngineError("it was broken off before it was submitted")
        except Exception as raised:
            error = raised
        self._failed(submitted.plan, error, ran=submitted.handle is not None)
        return None

    def _failed(self, plan: StepPlan, error: Exception, *, ran: bool) -> None:
        if is_out_of_memory(error) and self.scheduler.out_of_memory(plan, ran=ran):
            self._num_out_of_memory += 1
            message = "step %d found no memory for %d tokens, which are computed again, at most %d in a step: %s"
            logger.warning(message, plan.step, plan.num_tokens, self.scheduler.token_budget.limit, described(error))
            return
        logger.error("step %d failed", plan.step, exc_info=error)
        self._fail(plan, f"The step failed: {described(error)}", ran=ran)

    def _update(self, plan: StepPlan, result: StepResult | None) -> list[EngineOutput]:
        if plan.num_rows:
            self._num_steps += 1
            self.step_tokens.observe(plan.num_tokens)
        if result is None:
            return []
        try:
            with part("update"):
                return self.scheduler.update(plan, result)
        except EngineError as error:
            logger.error("step %d failed: %s", plan.step, error)
            self._fail(plan, str(error))
            return []

    def _break_off(self, error: BaseException) -> None:
        self._broken_off = "The step was broken off."  # first: another interrupt may strike in what follows
        self._broken_off = f"The step was broken off: {described(error)}"
        self._recover()

    def _recover(self) -> None:
        """After a step that was broken off: end all requests, and let nothing of it arrive later. If this is broken off
        too, the next call begins with it again."""
        if self._broken_off is None:
            return
        self.scheduler.start_over(self._broken_off)
        while self._in_flight:
            submitted = self._in_flight.popleft()
            if submitted.error is not None:
                self.scheduler.transfers.never_ran(submitted.plan)
            elif submitted.handle is not None:
                self._take_last_report(submitted.plan, submitted.handle)
        try:
            self.executor.settle()
        except Exception as error:
            logger.error("steps under way cannot be waited for: %s", error)
        self.scheduler.transfers.broken_off()
        self._num_failed_steps += 1
        self._broken_off = None
        self._tell_finished()

    def _take_last_report(self, plan: StepPlan, handle: StepHandle) -> None:
        """The step reads what the next one writes, and what its transfers have finished is told only once."""
        try:
            self.scheduler.take_report(plan, handle.result())
        except Exception as error:
            logger.error("a step in flight behind an interrupted one failed: %s", error)

    def _fail(self, plan: StepPlan, message: str, *, ran: bool = True) -> None:
        self._num_failed_steps += 1
        self.scheduler.fail(plan, message, ran=ran)

    def _tell_step(self, submitted: _Submitted, result: StepResult | None, wait_s: float, update_s: float) -> None:
        plan = submitted.plan
        numbers = self.stats()
        stats = StepStats(
            step=plan.step,
            num_requests=plan.num_rows,
            num_tokens=plan.num_tokens,
            num_sampled=int(plan.samples.sum()),
            num_running=numbers.num_running,
            num_waiting=numbers.num_waiting,
            kv_usage=numbers.kv_usage,
            num_preemptions=numbers.num_preemptions,
            prefix_query_tokens=numbers.prefix_query_tokens,
            prefix_hit_tokens=numbers.prefix_hit_tokens,
            plan_s=submitted.plan_s,
            wait_s=wait_s,
            update_s=update_s,
            failed=result is None,
        )
        for hook in self._on_step:
            _tell(hook, stats=stats)

    def _tell_finished(self) -> None:
        for request in self.scheduler.take_finished():
            for hook in self._on_finished:
                _tell(hook, request=request)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("The engine has been closed.")


def _hooks(observers: Sequence[object], name: str) -> list[Callable[..., Any]]:
    return [hook for observer in observers if callable(hook := getattr(observer, name, None))]


def _tell(hook: Callable[..., Any], **arguments: object) -> None:
    try:
        hook(**arguments)
    except Exception:
        logger.exception("the observer %r raised", hook)
