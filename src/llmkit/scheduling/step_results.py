"""Applying the result of a step: new tokens, stop conditions, commits to the prefix cache."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from llmkit.errors import EngineError
from llmkit.requests.logprobs import PositionLogprobs
from llmkit.requests.message import EngineOutput
from llmkit.requests.request import Request, RequestStatus
from llmkit.scheduling.grammar_gate import PARAM
from llmkit.scheduling.guarded_queue import GuardedQueue
from llmkit.scheduling.lifecycle import Lifecycle
from llmkit.scheduling.mask_threads import MaskJob, MaskThreads
from llmkit.scheduling.plan import StepPlan, StepResult
from llmkit.scheduling.sequence_memory import SequenceMemory
from llmkit.scheduling.served import ServedTokens

MAX_VOCAB_SIZE = 2**31


class StepResults:
    """Turns what a step has sampled into outputs. Rows whose request has ended meanwhile are dropped; a token of
    one that was preempted meanwhile is kept. The token of a row whose grammar is late counts as on its way until
    `settle_late` takes it.
    """

    def __init__(
        self,
        memory: SequenceMemory,
        lifecycle: Lifecycle,
        queue: GuardedQueue,
        masks: MaskThreads,
        vocab_size: int | None = None,
    ) -> None:
        """vocab_size: tokens beyond it end their request; None: any token is taken."""
        self._memory = memory
        self._vocab_size = MAX_VOCAB_SIZE if vocab_size is None else vocab_size
        self._queue = queue
        self._lifecycle = lifecycle
        self._masks = masks
        self._jobs: list[MaskJob] = []  # of the step that is being applied

    def apply(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Update the requests of `plan`, in row order. Raises EngineError if the result does not fit the plan."""
        token_ids = result.token_ids
        if not isinstance(token_ids, np.ndarray) or token_ids.dtype.kind != "i" or token_ids.ndim != 1:
            raise EngineError("The step returned token ids that are no array of integers.")
        tokens: list[int] = token_ids.tolist()
        if len(tokens) != len(plan.requests):
            raise EngineError(f"The step returned {len(tokens)} tokens for {len(plan.requests)} rows.")
        served = ServedTokens(plan) if self._queue.wants_served else None
        outputs: list[EngineOutput] = []
        running, finished = RequestStatus.RUNNING, RequestStatus.FINISHED
        logprobs = result.logprobs
        special = result.failed.keys() | result.prompt_logprobs.keys()
        if token_ids.max(initial=-1) >= self._vocab_size:
            special |= set(np.flatnonzero(token_ids >= self._vocab_size).tolist())
        ends: list[int] = (plan.num_computed + plan.num_new).tolist()
        # The plain case, one more token for a request that has some, is kept free of calls.
        for row, (request, token, end) in enumerate(zip(plan.requests, tokens, ends, strict=True)):
            status = request.status
            if status is finished:
                continue
            plain = request.has_sampled and request.grammar is None
            if token < 0 or status is not running or not plain or row in special:
                output = self._apply_row(plan, row, end, result)
                if output is None:
                    continue
            else:
                if end >= request.commit_at:
                    self._memory.commit(request, end)
                known = request.token_ids
                known.append(token)
                output = EngineOutput(
                    request_id=request.request_id,
                    index=request.index,
                    new_token_ids=[token],
                    num_cached_tokens=request.num_cached_tokens,
                    num_preemptions=request.num_preemptions,
                )
                if token in request.stop_token_ids or len(known) >= request.stop_at:
                    self._stop(request, token, output)
            if logprobs and row in logprobs:
                output.logprobs = [logprobs[row]]
            outputs.append(output)
        if self._jobs:
            outputs = self._with_masks(outputs)
        if outputs:
            self._lifecycle.preemptions_without_token = 0
        if served is not None:
            self._queue.served(*served.rows())
        return outputs

    def _with_masks(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        """`outputs` as the grammars would have them, without those of rows whose grammar is late."""
        jobs, self._jobs = self._jobs, []
        ended = self._masks.run(jobs)
        for job in jobs:
            if job in ended:
                self._took(job)
        late = {id(job.output) for job in jobs if job not in ended}
        return [output for output in outputs if id(output) not in late] if late else outputs

    def settle_late(self) -> None:
        """Take the tokens whose grammars were late and are not any more; told with the next outputs."""
        for job in self._masks.take_late():
            if job.request.status is not RequestStatus.FINISHED:
                self._took(job)
                self._lifecycle.tell([job.output])
                self._lifecycle.preemptions_without_token = 0

    def fail(self, plan: StepPlan, message: str) -> None:
        """The step of `plan` has failed as a whole: its requests end with an error, told with the next outputs."""
        for request in plan.requests:
            if request.status is not RequestStatus.FINISHED:
                self._lifecycle.end_with_news(request, "error", message)
        self._give_up_swaps(plan)

    def compute_again(self, plan: StepPlan) -> None:
        """The step of `plan` has computed nothing: its requests wait again, without blocks. Tokens that later steps,
        already on their way, sample for them are not taken."""
        for request in reversed(plan.requests):
            if request.status is RequestStatus.RUNNING:
                self._lifecycle.preempt_for_memory(request)
            elif request.status is RequestStatus.WAITING and self._memory.is_swapped(request):
                self._lifecycle.give_up_swapped(request)  # what this step was to write is missing there
        self._give_up_swaps(plan)

    def _give_up_swaps(self, plan: StepPlan) -> None:
        """What a step that has failed was to copy to the host may not be there."""
        if plan.swaps_out:
            for request in self._memory.swapped({host for _, host in plan.swaps_out}):
                self._lifecycle.give_up_swapped(request)

    def _apply_row(self, plan: StepPlan, row: int, end: int, result: StepResult) -> EngineOutput | None:
        """The general case of a row; None if there is nothing to tell."""
        request = plan.requests[row]
        if plan.step <= request.valid_after:
            return None
        token = int(result.token_ids[row])
        output = EngineOutput(
            request_id=request.request_id,
            index=request.index,
            new_token_ids=[],
            num_cached_tokens=request.num_cached_tokens,
            first_scheduled_time=request.group.metrics.first_scheduled_time,
            num_preemptions=request.num_preemptions,
        )
        samples = bool(plan.samples[row])
        if row in result.failed or (samples and not 0 <= token < self._vocab_size):
            output.finish_reason = "error"
            output.error = result.failed.get(row) or self._unusable(token)
            output.kv_transfer_params = self._lifecycle.end(request, "error", output.error)
            return output
        if request.status is RequestStatus.RUNNING and end >= request.commit_at:
            self._memory.commit(request, end)
        entries = result.prompt_logprobs.get(row)
        if request.wants_prompt_logprobs:
            output.prompt_logprobs = _owed(request, int(plan.num_computed[row]), entries or [])
        if samples:
            self._take_token(request, token, end, output)
        elif request.request.pooling is not None and end >= request.num_prompt_tokens:
            self._end_pooling(request, output, result.embeddings.get(row))
        elif not request.sampling and end >= request.num_prompt_tokens:
            self._end_scoring(request, output)
        return output if samples or output.prompt_logprobs or output.finish_reason else None

    def _unusable(self, token: int) -> str:
        if token < 0:
            return "The step returned no token for this request."
        return f"The step returned token {token} for this request; the model's ids are 0 to {self._vocab_size - 1}."

    def _take_token(self, request: Request, token: int, end: int, output: EngineOutput) -> None:
        if not request.has_sampled:
            self._first_token(request, end)
        length = len(request.token_ids) + 1
        if request.grammar is None or (token in request.stop_token_ids and length >= request.stop_length):
            self._append(request, token, output)
            self._stop_if_last(request, token, output)
        else:  # otherwise the answer ends
            self._jobs.append(MaskJob(request, token, length >= request.stop_at, output))

    def _append(self, request: Request, token: int, output: EngineOutput) -> None:
        request.token_ids.append(token)
        if request.status is RequestStatus.WAITING:
            request.num_expected_tokens = len(request.token_ids)  # preempted while the token was on its way
        output.new_token_ids = [token]

    def _took(self, job: MaskJob) -> None:
        """The grammar of a row has taken its token, or has a problem with it."""
        request, output = job.request, job.output
        self._append(request, job.token_id, output)
        problem = job.problem
        if problem is not None:
            output.finish_reason, output.error = "error", problem.message
            output.error_param = PARAM if problem.refused else None
        elif job.grammar.complete:
            output.finish_reason, output.last_token_is_text = "stop", True
            request.group.metrics.last_token_time = time.monotonic()
        else:
            self._stop_if_last(request, job.token_id, output)
            return
        output.kv_transfer_params = self._lifecycle.end(request, output.finish_reason, output.error)

    def _first_token(self, request: Request, num_computed_tokens: int) -> None:
        request.has_sampled = True
        metrics = request.group.metrics
        if metrics.first_token_time is None:
            metrics.first_token_time = time.monotonic()
        if request.group.pending:  # then it is their leader
            if request.status is RequestStatus.RUNNING:
                self._memory.commit(request, num_computed_tokens)  # a fork may start only from committed tokens
            self._lifecycle.prompt_done(request)

    def _end_scoring(self, request: Request, output: EngineOutput) -> None:
        """A prompt has been scored: that is the answer of all sequences."""
        output.finish_reason = "length"
        for sibling in list(request.group.pending):
            self._lifecycle.end_with_news(sibling, "length")
        output.kv_transfer_params = self._lifecycle.end(request, "length")

    def _end_pooling(self, request: Request, output: EngineOutput, embedding: list[float] | None) -> None:
        """A prompt has been embedded."""
        output.embedding = embedding
        output.finish_reason = "stop"
        if embedding is None:
            output.finish_reason, output.error = "error", "The step returned no embedding for this request."
        output.kv_transfer_params = self._lifecycle.end(request, output.finish_reason, output.error)

    def _stop_if_last(self, request: Request, token: int, output: EngineOutput) -> None:
        if token in request.stop_token_ids or len(request.token_ids) >= request.stop_at:
            self._stop(request, token, output)

    def _stop(self, request: Request, token: int, output: EngineOutput) -> None:
        """End `request` if its last token, `token`, does: end-of-sequence and stop tokens, then length."""
        length = len(request.token_ids)
        if token in request.stop_token_ids and length >= request.stop_length:
            output.finish_reason = "stop"
            output.stop_reason = None if token in request.eos_token_ids else token
        elif length >= request.stop_at:
            output.finish_reason = "length"
        else:
            return  # a stop token before min_tokens
        request.group.metrics.last_token_time = time.monotonic()
        output.kv_transfer_params = self._lifecycle.end(request, output.finish_reason)


def _owed(request: Request, start: int, entries: Sequence[PositionLogprobs]) -> list[PositionLogprobs | None] | None:
    """Of the prompt entries of a row that started at `start`, those not told yet; position 0 has None.

    A row that starts at `start` makes the positions from `start` + 1 on known. After a preemption the prompt is
    computed again, and its entries come again.
    """
    told = request.num_prompt_logprobs
    owed: list[PositionLogprobs | None] = [None] if told == 0 else []
    owed += entries[max(0, told - (start + 1)) :]
    request.num_prompt_logprobs += len(owed)
    return owed or None
