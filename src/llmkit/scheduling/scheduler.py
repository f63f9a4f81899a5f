"""The scheduler: requests in, plans out, results in, outputs out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from llmkit.errors import EngineError
from llmkit.hookspecs.scheduler import SchedulerPolicy
from llmkit.kv_cache.layout import KVCacheLayout
from llmkit.kv_cache.manager import KVCacheManager
from llmkit.requests.message import EngineOutput, EngineRequest
from llmkit.requests.output import FinishedRequest
from llmkit.scheduling.grammar_gate import GrammarGate
from llmkit.scheduling.guarded_queue import GuardedQueue
from llmkit.scheduling.lifecycle import Lifecycle
from llmkit.scheduling.limits import Limits
from llmkit.scheduling.plan import StepPlan, StepResult
from llmkit.scheduling.planner import Planner
from llmkit.scheduling.running import RunningSet
from llmkit.scheduling.sequence_memory import SequenceMemory
from llmkit.scheduling.step_results import StepResults
from llmkit.scheduling.token_budget import TokenBudget
from llmkit.scheduling.transfers import Transfers

if TYPE_CHECKING:
    from llmkit.config import EngineConfig
    from llmkit.grammars.service import GrammarService
    from llmkit.kv_cache.events import KVEvent
    from llmkit.registry.breaker import Breaker
    from llmkit.registry.timings import CallTiming
    from llmkit.scheduling.guarded_connector import GuardedConnector


logger = logging.getLogger("llmkit.scheduling")


class Scheduler:
    """Decides what each step computes. Used from one thread, by the engine core.

    Plans may be made ahead of results, up to `max_concurrent_steps` of them; results must be applied in the order
    of the plans. The parts, each with its own state: `queue` (who waits), `running` (who runs, slots), `memory`
    (blocks), lifecycle (unfinished requests), `transfers` (what is under way to and from a connector); the planner and
    the step results work on them. landed_step: the last one whose result has been applied.

    on_event: told of changes of the prefix cache. policy_calls: takes the counts and times of the policy's calls.
    policy_breaker: counts the policy's faults; one of its own by default. connector: the deciding half of a connector.
    clock: seconds, for its timeouts. grammars: compiles; without, a request with a grammar fails. vocab_size: of the
    model; a request for which a step returns a token beyond it ends with an error. None: not checked.

    Raises ConfigError if `config` leaves a limit open, PluginError for a policy that the core cannot serve.
    """

    def __init__(
        self,
        config: EngineConfig,
        layout: KVCacheLayout,
        policy: SchedulerPolicy,
        max_concurrent_steps: int = 1,
        on_event: Callable[[KVEvent], None] | None = None,
        policy_calls: dict[str, CallTiming] | None = None,
        policy_breaker: Breaker | None = None,
        connector: GuardedConnector | None = None,
        clock: Callable[[], float] = monotonic,
        grammars: GrammarService | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self.max_concurrent_steps = max_concurrent_steps
        self.transfers = Transfers(
            connector, config.connector, max_loading=config.scheduler.max_num_seqs or 1, clock=clock
        )
        self.grammars = GrammarGate(grammars, config.structured.mask_timeout_s)
        self._new_manager = partial(
            KVCacheManager,
            layout,
            max_model_len=config.model.max_model_len or 0,
            on_event=on_event,
            on_filled=self.transfers.on_filled,
        )
        self.manager = self._new_manager()
        self.limits = Limits.of(config, self.manager, max_concurrent_steps)
        self.queue = GuardedQueue(policy, policy_calls, policy_breaker)
        self.running = RunningSet(self.limits.max_num_seqs)
        if self.queue.swaps and not layout.num_host_blocks:
            logger.warning(
                "the scheduling policy %s preempts by swap, but there is no swap space (kv_cache.swap_space_gib): "
                "preempted requests will be computed again.",
                type(policy).__name__,
            )
        self.token_budget = TokenBudget(self.limits.max_num_batched_tokens)
        self._connect_parts()
        self._next_step = 0
        self.landed_step = -1

    def _connect_parts(self) -> None:
        self.transfers.bind(self.manager)
        self.memory = SequenceMemory(self.manager, self.transfers.holds.give_up_filled)
        self._lifecycle = Lifecycle(self.limits, self.queue, self.running, self.memory, self.transfers, self.grammars)
        self._planner = Planner(
            self.limits, self.queue, self.running, self.memory, self._lifecycle, self.transfers, self.token_budget
        )
        self._results = StepResults(
            self.memory, self._lifecycle, self.queue, self.grammars.masks, vocab_size=self._vocab_size
        )

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended, or whose end `take_news` has still to tell."""
        return len(self._lifecycle)

    @property
    def num_preemptions(self) -> int:
        return self._lifecycle.num_preemptions

    @property
    def num_swaps(self) -> int:
        """Preemptions by swap."""
        return self._lifecycle.num_swaps

    @property
    def num_swaps_missed(self) -> int:
        """Preemptions that the policy wanted by swap and that were, or became, recomputations."""
        return self._lifecycle.num_swaps_missed

    def add(self, request: EngineRequest) -> None:
        """Take in a request. Raises InvalidRequestError if its id is in use or it can never be served."""
        self._lifecycle.add(request)

    def abort(self, request_ids: Iterable[str], index: int | None = None) -> None:
        """End the requests (or only their sequence `index`) now, wherever they are; no output tells of it.

        Unknown and finished ids are ignored.
        """
        self._lifecycle.abort(request_ids, index)

    def plan(self) -> StepPlan | None:
        """The next step; None if there is nothing to compute, and nothing to move, now."""
        self._settle_loads()
        self._lifecycle.settle_grammars()
        self._results.settle_late()
        batch = self._planner.choose(self._next_step, self.landed_step)
        transfers = self.transfers.plan(self._next_step, batch, idle=self.landed_step == self._next_step - 1)
        if not batch.requests and transfers is None:
            return None
        swaps = self.manager.swap_space.take_copies()
        self.memory.planned()
        plan = batch.build(self._next_step, self.running.take_removed_slots(), transfers, swaps)
        self._next_step += 1
        return plan

    def _settle_loads(self) -> None:
        for request in self.transfers.requests.take_answered():
            self._lifecycle.go_on_waiting(request)
        for load in self.transfers.take_ended():
            self._lifecycle.load_ended(load)

    def update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Apply the result of the oldest plan that has none yet. Raises EngineError if it does not fit the plan;
        nothing has changed then, and `fail` must follow."""
        self.take_report(plan, result)
        outputs = self._results.apply(plan, result)
        self.token_budget.went_well()
        self.landed_step = plan.step
        return outputs

    def take_report(self, plan: StepPlan, result: StepResult | None) -> None:
        """What the connector's workers have finished by the end of the step of `plan`, whatever else became of it."""
        self.transfers.landed(plan, result)
        for load in self.transfers.take_ended():
            self._lifecycle.load_ended(load)

    def fail(self, plan: StepPlan, message: str, *, ran: bool = True) -> None:
        """The oldest plan that has no result has failed: its requests end with `message`. ran: whether it has reached
        the workers."""
        self._results.fail(plan, message)
        if not ran:
            self.transfers.never_ran(plan)
        self.take_report(plan, None)
        self.landed_step = plan.step

    def out_of_memory(self, plan: StepPlan, *, ran: bool) -> bool:
        """The oldest plan that has no result found no memory: its requests are computed again, in smaller steps. False,
        with nothing changed, if there are none; `fail` must follow. ran: as for `fail`."""
        if not self.token_budget.shrink(plan.num_tokens):
            return False
        self._results.compute_again(plan)
        if not ran:
            self.transfers.never_ran(plan)
        self.take_report(plan, None)
        self.landed_step = plan.step
        return True

    def start_over(self, message: str) -> None:
        """Some call above was broken off, nobody knows how far it had got: every unfinished request ends with
        `message`. If the books are in order then, nothing else is lost; otherwise they are begun anew."""
        last_words = self._lifecycle.last_words(message)
        try:
            self.abort([output.request_id for output in last_words])
            self.memory.planned()
            self.check_integrity()
            space = self.manager.swap_space
            in_order = not self.num_unfinished and not self.manager.num_sequences and space.num_free == space.num_blocks
        except Exception as error:
            logger.warning("a change of the scheduler was broken off halfway (%s); its books begin anew", error)
            in_order = False
        if not in_order:
            self._begin_anew()
        self.running.remove_all_slots()
        self.landed_step = self._next_step - 1  # the results of steps on their way are not applied any more
        self._lifecycle.tell(last_words)

    def _begin_anew(self) -> None:
        self.queue.clear()
        self.grammars.clear()
        self.manager = self._new_manager()
        self.manager.reset_prefix_cache()  # whoever follows the events learns that nothing is cached any more
        self.running = RunningSet(self.limits.max_num_seqs)
        before = self._lifecycle
        self._connect_parts()
        self._lifecycle.count_on_from(before)

    def take_news(self) -> list[EngineOutput]:
        """Outputs that are not the result of a step's row: errors, and ends decided while planning."""
        return self._lifecycle.take_news()

    def take_finished(self) -> list[FinishedRequest]:
        """Requests that have ended since the last call."""
        return self._lifecycle.take_finished()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, with nothing forgotten, while any request holds blocks.

        What requests have on the host is forgotten too.
        """
        while self.memory.give_up_kept():
            pass
        if self.manager.num_free_blocks == self.manager.num_blocks:
            for request in self.memory.swapped():
                self._lifecycle.give_up_swapped(request)
        if not self.manager.reset_prefix_cache():
            return False
        self.transfers.reset()
        return True

    def vacate(self) -> None:
        """The KV cache is about to go, while no step is under way: running requests wait, to be computed again, and
        nothing is cached any more. Raises EngineError, with the cache as it was, if others hold blocks."""
        for request in reversed(self.running.snapshot()):
            self._lifecycle.preempt_for_memory(request)
        for request in self.memory.swapped():
            self._lifecycle.give_up_swapped(request)
        if not self.reset_prefix_cache():
            raise EngineError("the KV cache is in use by transfers.")
        self.running.remove_all_slots()

    def tell(self, outputs: Iterable[EngineOutput]) -> None:
        """Return these with the next news."""
        self._lifecycle.tell(outputs)

    @property
    def has_news(self) -> bool:
        """Whether `take_news` has anything."""
        return self._lifecycle.has_news

    def close(self) -> None:
        """Close the connector's half, and end what compiles grammars. May be called twice."""
        self.transfers.close()
        self.grammars.close()

    def check_integrity(self) -> None:
        """Recount everything. Raises IntegrityError or AssertionError naming the first disagreement."""
        self.manager.check_integrity()
        self._lifecycle.check_integrity()
        self.transfers.check_integrity()
