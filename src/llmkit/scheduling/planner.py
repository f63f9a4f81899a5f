"""Choosing the rows of a step: running requests first, then waiting ones in the policy's order."""

from __future__ import annotations

import time

from llmkit.hookspecs.connector import LoadOffer
from llmkit.hookspecs.scheduler import Load
from llmkit.requests.request import Request, RequestStatus
from llmkit.scheduling.guarded_connector import NOTHING
from llmkit.scheduling.guarded_queue import GuardedQueue
from llmkit.scheduling.lifecycle import Lifecycle
from llmkit.scheduling.limits import Limits
from llmkit.scheduling.plan_builder import PlanBuilder
from llmkit.scheduling.running import RunningSet
from llmkit.scheduling.sequence_memory import SequenceMemory, Start
from llmkit.scheduling.token_budget import TokenBudget
from llmkit.scheduling.transfers import Transfers

WORTH_WAITING_FOR = 128  # tokens of a shared prefix: to compute fewer twice costs less than a step's delay


class Planner:
    """The one rule: every request gets the tokens that bring its computed tokens up to its expected ones, within
    the token budget, the sequence limit and the KV cache.

    A request that was preempted while a plan is made is not part of it, and nobody enters in that plan: what the
    victim gave up is for the one that needed it.
    """

    def __init__(
        self,
        limits: Limits,
        queue: GuardedQueue,
        running: RunningSet,
        memory: SequenceMemory,
        lifecycle: Lifecycle,
        transfers: Transfers,
        budget: TokenBudget,
    ) -> None:
        self._limits = limits
        self._budget = budget
        self._queue = queue
        self._running = running
        self._memory = memory
        self._lifecycle = lifecycle
        self._transfers = transfers
        self._preempted = False
        self._step = 0
        self._landed = -1
        # The request that last found no room, and how many blocks were free then: no need to look again before
        # that changes.
        self._blocked: tuple[Request, int] | None = None

    def choose(self, step: int, landed_step: int) -> PlanBuilder:
        """The rows of the next step, number `step`. `landed_step`: the last one whose result has been applied.

        May be empty while steps or transfers are under way. With none it is empty only if nothing is left to do:
        what can make no progress has then been ended.
        """
        self._step = step
        self._landed = landed_step
        batch = self._choose()
        while not batch.requests and self._preempted:
            # The last one that ran has yielded; now others may enter.
            batch = self._choose()
        return batch

    def _choose(self) -> PlanBuilder:
        self._preempted = False
        batch = PlanBuilder(self._budget.limit)
        if self._queue.mixes_prefill_and_decode:
            kinds = [(True, True)]
        else:
            kinds = [(True, False), (False, True)]
        for prefill, decode in kinds:
            self._go_on(batch, prefill=prefill, decode=decode)
            self._let_enter(batch, prefill=prefill, decode=decode)
            if batch.requests:
                break
        return batch

    def _go_on(self, batch: PlanBuilder, *, prefill: bool, decode: bool) -> None:
        """Rows for running requests."""
        running = RequestStatus.RUNNING
        add = batch.add
        for request in self._running.snapshot():
            if batch.budget <= 0:
                return
            if request.status is not running:
                continue  # preempted for one before it
            expected = request.num_expected_tokens
            computed = request.num_computed_tokens
            num_new = expected - computed
            if num_new == 1:
                if not decode or expected >= request.stop_at:
                    continue  # at its full length: the last token is on its way
                if request.grammar is not None and expected > len(request.token_ids):
                    continue  # what may come next depends on the token that is on its way
            elif num_new > 1 and prefill:
                num_new = self._chunk(request, num_new, batch.budget)
                if not num_new:
                    continue
            else:
                continue
            if computed + num_new > request.capacity:
                num_new = self._make_room(batch, request, num_new)
                if not num_new:
                    continue
            add(request, num_new)

    def _make_room(self, batch: PlanBuilder, request: Request, num_new: int) -> int:
        """Blocks for `num_new` more tokens of a running request, taken from others if need be.

        How many of them got room: all; fewer, if nobody is left to take from; or none.
        """
        computed = request.num_computed_tokens
        while (updates := self._memory.grow(request, computed + num_new)) is None:
            running = self._running.snapshot()
            if len(running) > 1:
                victim = self._victim(running, request)
                batch.withdraw(victim)
                self._lifecycle.preempt(victim, self._step)
                self._preempted = True
                if victim is request:
                    return 0
            elif request.last_step > self._landed:
                return 0  # what its submitted steps leave behind may be enough
            elif num_new == 1 and self._transfers.worth_waiting(request):
                return 0
            elif num_new == 1:
                self._end_stuck(request)
                return 0
            else:
                num_new //= 2
        batch.grow(request, updates)
        return num_new

    def _victim(self, running: list[Request], needing: Request) -> Request:
        # A policy that lets requests throw each other out in turn would stand still for ever. Taking the youngest
        # until a token has been sampled ends that: the oldest is then never thrown out.
        if self._lifecycle.preemptions_without_token > 2 * self._limits.max_num_seqs:
            return max(running, key=lambda request: request.sequence_number)
        return self._queue.victim(running, needing)

    def _let_enter(self, batch: PlanBuilder, *, prefill: bool, decode: bool) -> None:
        """Rows for waiting requests. The first that cannot enter holds up those behind it."""
        in_flight = self._landed < self._step - 1
        while batch.budget > 0 and len(self._running) < self._limits.max_num_seqs and not self._preempted:
            if self._transfers.requests.full:
                return
            request = self._queue.peek()
            if request is None or (request.last_step > self._landed and in_flight):
                return  # nobody waits, or the first one's own last token, or its blocks, are still on their way
            if request.grammar is not None and request.grammar.pending:
                return  # it was preempted before its grammar had taken in its last token
            decodes = (
                self._memory.is_swapped(request) and request.num_expected_tokens - request.num_computed_tokens == 1
            )
            if not (decode if decodes else prefill):
                return
            alone = not len(self._running)
            if not alone:
                if self._blocked == (request, self._memory.manager.num_free_blocks):
                    return
                if not self._queue.admit(request, self._load(batch)):
                    return
            self._blocked = None
            if self._prefix_is_being_computed(batch, request):
                return
            if self._enter(batch, request, alone):
                continue
            if not alone or self._transfers.worth_waiting(request):
                return
            self._end_stuck(request)

    def _prefix_is_being_computed(self, batch: PlanBuilder, request: Request) -> bool:
        """Whether a row of this step computes at least half of what `request` would have to compute, for the cache.

        It is then better off a step later. That cannot go on for ever, as each such step gets on with a prompt.
        """
        if not self._memory.manager.prefix_caching or request.needs_whole_prompt:
            return False
        if self._memory.is_swapped(request):
            return False
        tokens, missing = request.token_ids, None
        for row, num_new in zip(batch.requests, batch.num_new, strict=True):
            if num_new < WORTH_WAITING_FOR or row.token_ids[0] != tokens[0]:
                continue
            if row.cache_salt != request.cache_salt or row.extra_keys != request.extra_keys:
                continue
            if missing is None:
                cached = self._memory.manager.lookup(request).num_tokens
                missing = cached + max(WORTH_WAITING_FOR, (len(tokens) - cached) // 2)
            first = row.num_computed_tokens
            if first < missing <= first + num_new and row.token_ids[:missing] == tokens[:missing]:
                return True
        return False

    def _enter(self, batch: PlanBuilder, request: Request, alone: bool) -> bool:
        """Admit `request` if budget and blocks suffice; `alone`, with fewer tokens of its prompt if need be. It may
        also leave the queue to wait for the connector."""
        limit = batch.budget
        offer: LoadOffer | None = None
        offered_at = -1
        while True:
            start = self._memory.start(request)
            if offer is None or (offer is not NOTHING and start.num_computed_tokens != offered_at):
                offer, offered_at = self._offer(request, start), start.num_computed_tokens
            if offer is None:
                self._lifecycle.park(request)
                return True
            computed = start.num_computed_tokens + offer.num_tokens
            num_new = 0
            if not offer.asynchronous:
                num_new = min(limit, self._chunk(request, request.num_expected_tokens - computed, batch.budget))
                if not num_new:
                    return False
            if self._memory.place(request, start, computed + num_new, offer.num_tokens):
                break
            if self._memory.give_up_kept():
                continue
            if not alone:
                self._blocked = (request, self._memory.manager.num_free_blocks)
                return False
            if offer is not NOTHING:
                offer = NOTHING
                continue
            if num_new > 1:
                limit = num_new // 2
            elif self._memory.is_swapped(request) and not self._transfers.worth_waiting(request):
                self._lifecycle.give_up_swapped(request)  # computed in small steps it may need fewer blocks
                limit, offer = batch.budget, None
            else:
                return False
        if offer is not NOTHING:
            self._transfers.requests.begin(request, start.num_computed_tokens, offer)
        if offer.asynchronous:
            self._lifecycle.load(request)
        else:
            self._runs(batch, request, start, computed, num_new)
        self._transfers.requests.entered(request, start.num_computed_tokens)
        return True

    def _offer(self, request: Request, start: Start) -> LoadOffer | None:
        """What to load behind `start`. Not for a fork, for prompts whose tokens have to be scored, nor for what comes
        back from the host."""
        if start.hit is None or self._memory.is_swapped(request):
            return NOTHING
        return self._transfers.requests.offer(request, start.num_computed_tokens)

    def _runs(self, batch: PlanBuilder, request: Request, start: Start, computed: int, num_new: int) -> None:
        self._queue.pop(request)
        self._running.enter(request)
        request.num_computed_tokens = computed
        if request.last_step < 0:
            self._enters_first(request, min(computed, request.num_prompt_tokens))
        batch.enter(request, num_new, self._memory.manager.block_ids(request), start.block_copies)

    def _enters_first(self, request: Request, num_cached_tokens: int) -> None:
        group = request.group
        if request is group.leader:
            group.num_cached_tokens = num_cached_tokens
            group.metrics.first_scheduled_time = time.monotonic()
        else:
            self._lifecycle.forked(request)
        request.num_cached_tokens = group.num_cached_tokens

    def _chunk(self, request: Request, pending: int, budget: int) -> int:
        """How many of `pending` tokens to compute now; 0: none, because the prompt must not be cut."""
        offered = min(pending, budget)
        if self._limits.chunked_prefill:
            return self._queue.chunk(request, offered) if pending > 1 else offered
        # One that was preempted may have grown beyond the budget, or memory is short; it is cut all the same.
        return 0 if offered < pending <= self._budget.limit else offered

    def _end_stuck(self, request: Request) -> None:
        """Nothing else holds blocks and still `request` finds no room."""
        held = self._transfers.holds_blocks
        if request.num_output_tokens and not held:
            self._lifecycle.end_with_news(request, "length")
            return
        self._lifecycle.end_with_news(
            request,
            "error",
            f"The KV cache has no room for the {request.num_tokens} tokens of this request, although nothing else "
            f"runs{' but transfers of the connector, which do not end' if held else ''}.",
        )

    def _load(self, batch: PlanBuilder) -> Load:
        manager = self._memory.manager
        return Load(
            num_running=len(self._running),
            max_num_seqs=self._limits.max_num_seqs,
            num_waiting=len(self._queue),
            token_budget_left=batch.budget,
            num_free_blocks=manager.num_free_blocks,
            num_blocks=manager.num_blocks,
        )
