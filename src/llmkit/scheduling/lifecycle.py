"""From `add` to the end: where each request is, and what happens when it moves."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from llmkit.errors import InvalidRequestError
from llmkit.grammars.cache import GrammarFailure
from llmkit.requests.message import EngineOutput, EngineRequest, FinishReason
from llmkit.requests.output import FinishedRequest
from llmkit.requests.request import Request, RequestGroup, RequestStatus
from llmkit.scheduling.grammar_gate import PARAM, GrammarGate
from llmkit.scheduling.guarded_queue import GuardedQueue
from llmkit.scheduling.limits import Limits
from llmkit.scheduling.pending_loads import EndedLoad
from llmkit.scheduling.running import RunningSet
from llmkit.scheduling.sequence_memory import SequenceMemory
from llmkit.scheduling.transfers import Transfers


class Lifecycle:
    """Owns the record of unfinished requests, and carries out every change of a request's status but admission.

    news: outputs that no row of a step has produced, to be returned with the next ones. finished: requests that
    have ended since the last `take_finished`. preemptions_without_token: since the last sampled token, a measure of
    standstill. The rest counts from the start: num_preemptions; num_swaps: those of them by swap; num_swaps_missed:
    those that the policy wanted by swap and that were, or became, recomputations.
    """

    def __init__(
        self,
        limits: Limits,
        queue: GuardedQueue,
        running: RunningSet,
        memory: SequenceMemory,
        transfers: Transfers,
        grammars: GrammarGate,
    ) -> None:
        self._limits = limits
        self._grammars = grammars
        self._transfers = transfers
        self._queue = queue
        self._running = running
        self._memory = memory
        self._groups: dict[str, RequestGroup] = {}
        self._next_number = 0
        self._finished: list[FinishedRequest] = []
        self._news: list[EngineOutput] = []
        self.num_preemptions = self.num_swaps = self.num_swaps_missed = 0
        self.preemptions_without_token = 0

    def __len__(self) -> int:
        """Requests that have not ended, or whose end nobody has been told yet."""
        return len(self._groups) + len(self._news)

    def add(self, request: EngineRequest) -> None:
        """Take in a request; its first sequence waits. Raises InvalidRequestError."""
        if request.request_id in self._groups:
            raise InvalidRequestError(
                f"A request with id {request.request_id[:80]!r} is already being served.", param="request_id"
            )
        self._limits.check(request)
        self._transfers.check(request.kv_transfer_params)
        group = RequestGroup(request, self._next_number, self._limits.stop_at(request))
        self._next_number += len(group.sequences)
        self._groups[request.request_id] = group
        leader = group.leader
        if request.grammar is not None:
            leader.status = RequestStatus.COMPILING
            self._grammars.enter(group)
        else:
            self._queue.add(leader)
        if request.max_tokens > 0 and request.prior_outputs:
            for sequence in reversed(group.sequences):
                if sequence.status is not RequestStatus.FINISHED and sequence.num_tokens >= sequence.stop_at:
                    self.end_with_news(sequence, "length")  # resumed, but already as long as it may get

    def abort(self, request_ids: Iterable[str], index: int | None) -> None:
        """End all sequences of the given requests, or only sequence `index`. Unknown ones are ignored."""
        for request_id in request_ids:
            if self._news:  # an id may be used again at once: the new request must not get the old one's end
                self._news = [
                    news for news in self._news if news.request_id != request_id or index not in (None, news.index)
                ]
            group = self._groups.get(request_id)
            if group is None:
                continue
            # Last sequence first: the end of a leader would only hand its part on to a sibling.
            for request in reversed(group.sequences):
                if request.status is not RequestStatus.FINISHED and index in (None, request.index):
                    self.end(request, "abort")

    def end(self, request: Request, reason: FinishReason, error: str | None = None) -> dict[str, Any] | None:
        """Take `request` out, wherever it is. Its leader's blocks stay while siblings can still be forked.

        Returns what the connector wants its client to have.
        """
        group = request.group
        transfer_params = self._transfers.finished(request)
        status = request.status
        if status is RequestStatus.RUNNING:
            self._running.leave(request)
        elif status is RequestStatus.WAITING:
            self._queue.remove(request)
        elif status is RequestStatus.LOADING:
            self._transfers.give_up(request)
        elif status is RequestStatus.PENDING:
            group.pending.remove(request)
        request.status = RequestStatus.FINISHED
        group.finish_reasons[request.index] = reason
        group.num_output_tokens += request.num_output_tokens
        if error is not None:
            group.errors.append(error)
        if request is not group.leader:
            self._memory.free(request)
            if request.last_step < 0:
                self.forked(request)
        elif reason != "error" and request.forkable and group.num_unforked:
            self._memory.keep(request)
        else:
            self._memory.free(request)
            if group.pending:
                self._promote(group)
        if len(group.finish_reasons) == len(group.sequences):
            self._close(group)
        return transfer_params

    def end_with_news(
        self,
        request: Request,
        reason: FinishReason,
        error: str | None = None,
        param: str | None = None,
        *,
        overloaded: bool = False,
    ) -> None:
        """`end`, and an output that says so. param: the field of the request that is to blame for the error.
        overloaded: it may be sent again."""
        transfer_params = self.end(request, reason, error)
        output = _end_of(request, reason, error)
        output.error_param = param
        output.overloaded = overloaded
        output.kv_transfer_params = transfer_params
        self._news.append(output)

    def settle_grammars(self) -> None:
        """Requests whose grammar has been compiled wait for their turn; those that get none end."""
        for group, result in self._grammars.leave():
            failure = result if isinstance(result, GrammarFailure) else self._grammars.begin(group, result)
            if failure is not None:
                param = PARAM if failure.refused else None
                for request in reversed(group.sequences):
                    if request.status is not RequestStatus.FINISHED:
                        self.end_with_news(request, "error", failure.message, param, overloaded=failure.overloaded)
                continue
            for request in reversed(group.sequences):
                complete = request.grammar is not None and request.grammar.complete
                if complete and request.status is not RequestStatus.FINISHED:
                    self.end_with_news(request, "stop")
            if group.leader.status is RequestStatus.COMPILING:
                group.leader.status = RequestStatus.WAITING
                self._queue.add(group.leader)

    def park(self, request: Request) -> None:
        """The request that should enter next waits for the connector's answer, and lets others go first."""
        self._queue.pop(request)
        request.status = RequestStatus.LOADING
        self._transfers.requests.park(request)

    def load(self, request: Request) -> None:
        """The request that should enter next waits while its blocks are loaded."""
        self._queue.pop(request)
        request.status = RequestStatus.LOADING

    def go_on_waiting(self, request: Request) -> None:
        """The connector has an answer for `request`, or has loaded its blocks: it may enter."""
        request.status = RequestStatus.WAITING
        self._queue.requeue(request)

    def load_ended(self, load: EndedLoad) -> None:
        """An asynchronous load is over, or a synchronous one has failed: what a step computed behind it is wrong."""
        request = load.request
        if request.status is RequestStatus.FINISHED:
            return
        if load.failed and self._transfers.fails_requests:
            self.end_with_news(request, "error", "The stored KV blocks of this request could not be loaded.")
        elif load.asynchronous:
            self._memory.loaded(request, load.num_tokens)
            self.go_on_waiting(request)
        else:
            self._compute_again(request, load.num_tokens)

    def _compute_again(self, request: Request, num_tokens: int) -> None:
        """Only the first `num_tokens` tokens of `request` are in its blocks; steps on their way compute nonsense."""
        request.valid_after = request.last_step
        if request.status is RequestStatus.RUNNING:
            self._running.leave(request)
            self._memory.commit(request, num_tokens)
            self._memory.free(request)
            request.num_computed_tokens = 0
            self.go_on_waiting(request)
        elif self._memory.is_swapped(request):
            self.give_up_swapped(request)
        request.num_expected_tokens = len(request.token_ids)
        if not request.has_sampled:
            cached = min(num_tokens, request.num_prompt_tokens)
            request.num_cached_tokens = min(request.num_cached_tokens, cached)
            if request is request.group.leader:
                request.group.num_cached_tokens = request.num_cached_tokens

    def preempt(self, request: Request, step: int) -> None:
        """Take the blocks of a running request and let it wait again, while `step` is planned.

        What they hold goes to the host if the policy wants that and there is room, and is computed again otherwise. A
        token that a submitted step samples for it is still taken when it arrives.
        """
        self._transfers.preempted(request)
        self._running.leave(request)
        if self._queue.swaps and self._memory.swap_out(request):
            self.num_swaps += 1
            request.last_step = step  # which carries the copies: until it has landed, the host's are not certain
        else:
            self.num_swaps_missed += self._queue.swaps
            self._memory.free(request)
            request.num_computed_tokens = 0
        self._wait_again(request)

    def preempt_for_memory(self, request: Request) -> None:
        """Let a running request wait and be computed again, as the device had no memory for its step: what that step
        and those behind it compute for it is not taken."""
        self._transfers.preempted(request)
        self._running.leave(request)
        self._memory.free(request)
        request.num_computed_tokens = 0
        request.valid_after = request.last_step
        self._wait_again(request)

    def _wait_again(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        request.num_expected_tokens = len(request.token_ids)
        request.num_preemptions += 1
        request.group.metrics.num_preemptions += 1
        self.num_preemptions += 1
        self.preemptions_without_token += 1
        self._queue.requeue(request)

    def give_up_swapped(self, request: Request) -> None:
        """A request that was swapped out will be computed from the start after all."""
        self._memory.forget_swapped(request)
        self.num_swaps_missed += 1

    def prompt_done(self, leader: Request) -> None:
        """The leader of a group has computed the prompt: its siblings wait to be forked from it."""
        pending = leader.group.pending
        while pending:
            sibling = pending.pop()
            sibling.status = RequestStatus.WAITING
            self._queue.add(sibling)

    def forked(self, request: Request) -> None:
        """A sibling of the leader has entered, or never will: one less that the leader's blocks are needed for."""
        group = request.group
        group.num_unforked -= 1
        if not group.num_unforked and group.leader.status is RequestStatus.FINISHED:
            self._memory.free(group.leader)

    def last_words(self, message: str) -> list[EngineOutput]:
        """What was to be told, and that every unfinished sequence has ended with the error `message`."""
        words = self.take_news()
        for group in self._groups.values():
            unfinished = [request for request in group.sequences if request.index not in group.finish_reasons]
            words += [_end_of(request, "error", message) for request in unfinished]
        return words

    def count_on_from(self, before: Lifecycle) -> None:
        """Go on with the numbers of another one: the policy may still know requests by theirs."""
        self._next_number = before._next_number
        self.num_preemptions = before.num_preemptions
        self.num_swaps, self.num_swaps_missed = before.num_swaps, before.num_swaps_missed

    def tell(self, news: Iterable[EngineOutput]) -> None:
        """Return these outputs with the next ones."""
        self._news += news

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def take_news(self) -> list[EngineOutput]:
        news, self._news = self._news, []
        return news

    def take_finished(self) -> list[FinishedRequest]:
        finished, self._finished = self._finished, []
        return finished

    def check_integrity(self) -> None:
        """Every unfinished sequence must be in exactly the one place that its status says, and hold a slot and
        blocks only if it runs. Raises AssertionError naming the first that is not."""
        sequences = [request for group in self._groups.values() for request in group.sequences]
        running = self._running.snapshot()
        for request in sequences:
            status = request.status
            places = (
                (RequestStatus.RUNNING, request in running),
                (RequestStatus.WAITING, request in self._queue),
                (RequestStatus.PENDING, request in request.group.pending),
                (RequestStatus.LOADING, request in self._transfers),
                (RequestStatus.COMPILING, request is request.group.leader and request.group in self._grammars),
            )
            for place, is_there in places:
                assert is_there == (status is place), f"{request} and {place}: {is_there}"
            assert (request.slot >= 0) == (status is RequestStatus.RUNNING), f"{request} and its slot"
            without_blocks = (RequestStatus.WAITING, RequestStatus.PENDING, RequestStatus.COMPILING)
            assert status not in without_blocks or not request.capacity, f"{request} holds blocks"
            swapped = status is RequestStatus.WAITING and request.num_computed_tokens > 0
            assert self._memory.is_swapped(request) == swapped, f"{request} and the swap space"
        counts = Counter(request.status for request in sequences)
        for name, count, status in (
            ("run", len(running), RequestStatus.RUNNING),
            ("wait", len(self._queue), RequestStatus.WAITING),
            ("wait for the connector", self._transfers.num_waiting, RequestStatus.LOADING),
            ("wait for a grammar", len(self._grammars), RequestStatus.COMPILING),
        ):
            assert count == counts[status], f"{count} {name}, {counts[status]} should"
        self._running.check_integrity()

    def _promote(self, group: RequestGroup) -> None:
        """The leader is gone before its siblings could be forked: the next one computes the prompt."""
        leader = group.pending.pop()
        group.leader = leader
        group.num_unforked -= 1
        if group in self._grammars:
            leader.status = RequestStatus.COMPILING
            return
        leader.status = RequestStatus.WAITING
        self._queue.add(leader)

    def _close(self, group: RequestGroup) -> None:
        self._memory.free(group.leader)
        request = group.request
        del self._groups[request.request_id]
        self._grammars.drop(group)
        group.metrics.finished_time = time.monotonic()
        self._finished.append(
            FinishedRequest(
                request_id=request.request_id,
                user=request.user,
                priority=request.priority,
                num_prompt_tokens=len(request.prompt_token_ids),
                num_output_tokens=group.num_output_tokens,
                num_cached_tokens=group.num_cached_tokens,
                finish_reasons=tuple(group.finish_reasons[i] for i in range(len(group.sequences))),
                metrics=group.metrics,
                errors=tuple(group.errors),
            )
        )


def _end_of(request: Request, reason: FinishReason, error: str | None) -> EngineOutput:
    return EngineOutput(
        request_id=request.request_id,
        index=request.index,
        new_token_ids=[],
        finish_reason=reason,
        num_cached_tokens=request.num_cached_tokens,
        error=error,
        first_scheduled_time=request.group.metrics.first_scheduled_time,
        num_preemptions=request.num_preemptions,
    )
