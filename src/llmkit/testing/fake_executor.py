"""Executors without a model: one that checks every plan against a fake KV cache, one that computes nothing.

The fake model's next token is a hash of the whole token history *as the cache holds it*: each cache entry stores the
hash of all tokens up to its position, so a block that is missing, stale, shared by mistake or not yet copied is
noticed at once, and a run under any scheduling must give the tokens of `fake_answer`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from llmkit.hookspecs.executor import Executor
from llmkit.requests.logprobs import PositionLogprobs
from llmkit.requests.message import EngineRequest, Pooling
from llmkit.scheduling.plan import AddedRow, IntArray, StepPlan, StepResult

if TYPE_CHECKING:
    from llmkit.execution.setup import WorkerReport, WorkerSetup
    from llmkit.execution.worker_transfers import WorkerTransfers
    from llmkit.hookspecs.connector import WorkerConnector
    from llmkit.kv_cache.layout import KVCacheLayout

VOCABULARY = 211
_PRIME = (1 << 61) - 1


class PlanError(AssertionError):
    """A plan contradicts itself or what earlier plans have said."""


def next_hash(history: int, token: int) -> int:
    """Hash of a token history that is one token longer."""
    return (history * 1_000_003 + token + 1) % _PRIME


def sample(history: int, seed: int, mask: IntArray | None = None) -> int:
    """The fake model's token after a history, for a sequence with `seed`; one of `mask` int32[words], if given."""
    number = (history * 31 + seed * 7_919) % _PRIME
    if mask is None:
        return number % VOCABULARY
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCABULARY])
    return int(allowed[number % len(allowed)])


def fake_answer(prompt: Iterable[int], seed: int, num_tokens: int) -> list[int]:
    """The first `num_tokens` tokens that the fake model answers, stop conditions aside."""
    history = 0
    for token in prompt:
        history = next_hash(history, token)
    answer = []
    for _ in range(num_tokens):
        answer.append(sample(history, seed))
        history = next_hash(history, answer[-1])
    return answer


def fake_embedding(prompt: Iterable[int], pooling: Pooling) -> list[float]:
    """The fake model's embedding of a prompt."""
    history, states = 0, []
    for token in prompt:
        history = next_hash(history, token)
        states.append(_hidden_state(history))
    return [states[-1] if pooling == "last" else sum(states) / len(states)]


def _hidden_state(history: int) -> float:
    return float(history % 1009)


@dataclass(slots=True)
class _Slot:
    """State of a slot as the plans so far have described it. hashes[p]: hash of the tokens up to position p.

    lost: a step with it has failed, so steps that were submitted by then compute nonsense for it.
    """

    request: EngineRequest
    index: int
    seed: int
    num_prompt_tokens: int
    tokens: list[int]
    tables: list[list[int]]
    hashes: list[int] = field(default_factory=list)
    lost: bool = False
    pooled: float = 0.0

    def hashes_up_to(self, length: int) -> list[int]:
        for position in range(len(self.hashes), length):
            history = self.hashes[-1] if self.hashes else 0
            self.hashes.append(next_hash(history, self.tokens[position]))
        return self.hashes


class _Handle:
    def __init__(self, executor: FakeExecutor, plan: StepPlan) -> None:
        self._executor = executor
        self.plan = plan
        self.outcome: StepResult | Exception | None = None

    def result(self) -> StepResult:
        self._executor.run_until(self)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome


class FakeExecutor(Executor):
    """Executes plans in order when their results are asked for, and raises PlanError for a wrong one.

    max_concurrent_steps: as of a real executor. budget, max_num_seqs: checked if given. before_step: called with
    each plan before it is executed, to inject failures. failing_rows: plan → row → message, likewise.
    violations: every PlanError so far; an engine ends the requests of such a step and goes on, a test must not.
    connector: a worker half to drive; its tensors, one a layer, are all the same [num_blocks, block_size] int64.
    num_swapped_out, num_swapped_in: blocks copied to the host and back.
    """

    def __init__(
        self,
        max_concurrent_steps: int = 1,
        *,
        budget: int | None = None,
        max_num_seqs: int | None = None,
        before_step: Callable[[StepPlan], None] | None = None,
        failing_rows: Callable[[StepPlan], dict[int, str]] | None = None,
        connector: WorkerConnector | None = None,
    ) -> None:
        self.max_concurrent_steps = max_concurrent_steps
        self._connector = connector
        self.closed = False
        self.asleep = 0
        self.violations: list[PlanError] = []
        self.num_tokens_computed = 0
        self.num_swapped_out = self.num_swapped_in = 0
        self._budget = budget
        self._max_num_seqs = max_num_seqs
        self._before_step = before_step
        self._failing_rows = failing_rows
        self._queue: deque[_Handle] = deque()
        self._slots: dict[int, _Slot] = {}
        self._last_step = -1

    def start(self, setup: WorkerSetup) -> WorkerReport:
        raise NotImplementedError("the fake executor has no model to load; give it a layout with allocate()")

    def allocate(self, layout: KVCacheLayout) -> None:
        self._layout = layout
        self._cache = np.full((layout.num_blocks, layout.block_size), -1, np.int64)
        self._host_cache = np.full((layout.num_host_blocks, layout.block_size), -1, np.int64)
        self._transfers: WorkerTransfers | None = None
        if self._connector is not None:
            import torch

            from llmkit.execution.worker_transfers import WorkerTransfers

            self._num_layers = len(layout.group_of_layer())
            self._connector.register(layout, [torch.from_numpy(self._cache)] * self._num_layers)
            self._transfers = WorkerTransfers(self._connector, self._num_layers)

    def submit(self, plan: StepPlan) -> _Handle:
        if self.asleep:
            self._violation("a step while asleep")
        if len(self._queue) >= self.max_concurrent_steps:
            self._violation(f"more than {self.max_concurrent_steps} steps at once")
        handle = _Handle(self, plan)
        self._queue.append(handle)
        return handle

    def settle(self) -> None:
        if self._queue:
            self.run_until(self._queue[-1])

    def sleep(self, level: int) -> None:
        """Forget the cache and all slots; `asleep` is the level until both parts are awake."""
        self.asleep = level
        self._slots.clear()
        self._cache[:] = -1
        self._host_cache[:] = -1

    def wake_up(self, part: str) -> None:
        if part == "kv_cache":
            self.asleep = 0

    def close(self) -> None:
        self.closed = True
        if self._transfers is not None:
            self._transfers.close()

    def run_until(self, handle: _Handle) -> None:
        """Execute the submitted steps up to and including that of `handle`."""
        while handle.outcome is None:
            current = self._queue.popleft()
            try:
                current.outcome = self._execute(current.plan)
            except BaseException as error:
                current.outcome = error if isinstance(error, Exception) else RuntimeError("interrupted")
                for slot in current.plan.slots.tolist():
                    if slot in self._slots:
                        self._slots[slot].lost = True
                for _, host in current.plan.swaps_out:
                    self._host_cache[host] = -1  # a failed step may have written anything
                if isinstance(error, PlanError):
                    self.violations.append(error)
                if not isinstance(error, Exception):
                    raise

    def _violation(self, message: str) -> None:
        raise PlanError(message)

    def _execute(self, plan: StepPlan) -> StepResult:
        self._apply_changes(plan)
        self._check_shape(plan)
        result = StepResult(np.full(plan.num_rows, -1, np.int32))
        transfers = self._transfers
        if transfers is None:
            self._compute(plan, result)
            self._check_all_reads(plan, frozenset())
            return result
        transfers.begin(plan.transfers)
        try:
            for layer in range(self._num_layers):
                transfers.before_layer(layer)
            self._compute(plan, result)
            for layer in range(self._num_layers):
                transfers.after_layer(layer)
        except BaseException:
            transfers.break_off()
            raise
        result.transfers = transfers.finish()
        result.transfer_faults = transfers.take_faults()
        self._check_all_reads(plan, result.transfers.failed_blocks)
        return result

    def _compute(self, plan: StepPlan, result: StepResult) -> None:
        if self._before_step is not None:
            self._before_step(plan)
        writers: dict[tuple[int, int], int] = {}
        starts, news = plan.num_computed.tolist(), plan.num_new.tolist()
        rows = [(row, slot) for row, slot in enumerate(plan.slots.tolist()) if not self._slots[slot].lost]
        for row, slot in rows:
            self._write(slot, starts[row], starts[row] + news[row], writers)
        for row, slot in rows:
            state, end = self._slots[slot], starts[row] + news[row]
            if plan.samples[row]:
                result.token_ids[row] = self._sample(state, end, result, row, _mask(plan, row))
            _prompt_logprobs(state, starts[row], end, result, row)
            _embed(state, starts[row], end, result, row)
        if self._failing_rows is not None:
            result.failed.update(self._failing_rows(plan))
        self.num_tokens_computed += plan.num_tokens

    def _check_all_reads(self, plan: StepPlan, failed_blocks: frozenset[int]) -> None:
        """What a row has read must be right, unless its load has failed: then so is all that is computed from it."""
        for slot, start, new in zip(
            plan.slots.tolist(), plan.num_computed.tolist(), plan.num_new.tolist(), strict=True
        ):
            state = self._slots[slot]
            if not state.lost and failed_blocks.isdisjoint(block for table in state.tables for block in table):
                self._check_reads(slot, start + new)
            else:
                state.lost = True

    def _apply_changes(self, plan: StepPlan) -> None:
        if plan.step <= self._last_step:
            self._violation(f"step {plan.step} after step {self._last_step}")
        self._last_step = plan.step
        everything = len(plan.removed_slots) == self._max_num_seqs  # after an interrupt, whatever the slots hold
        for slot in plan.removed_slots:
            if self._slots.pop(slot, None) is None and not everything:
                self._violation(f"slot {slot} is removed but holds nothing")
        for added in plan.added:
            if added.slot in self._slots:
                self._violation(f"slot {added.slot} is added but taken")
            self._slots[added.slot] = self._new_slot(added)
        for update in plan.block_updates:
            table = self._slots[update.slot].tables[update.group]
            if len(table) != update.start:
                self._violation(f"slot {update.slot}: update at column {update.start} of {len(table)}")
            table += update.block_ids
        self._swap(plan)
        for source, destination in plan.block_copies:
            self._cache[destination] = self._cache[source]

    def _swap(self, plan: StepPlan) -> None:
        written, filled = [host for _, host in plan.swaps_out], [block for block, _ in plan.swaps_in]
        if len(set(written)) != len(written) or len(set(filled)) != len(filled) or 0 in filled:
            self._violation(f"blocks are written twice: {plan.swaps_out} out, {plan.swaps_in} in")
        for block, host in plan.swaps_out:
            self._host_cache[host] = self._cache[block]
        for block, host in plan.swaps_in:
            self._cache[block] = self._host_cache[host]
        self.num_swapped_out += len(written)
        self.num_swapped_in += len(filled)

    def _new_slot(self, added: AddedRow) -> _Slot:
        if len(added.block_ids) != len(self._layout.groups):
            self._violation(f"slot {added.slot}: {len(added.block_ids)} tables")
        tables = [list(table) for table in added.block_ids]
        return _Slot(added.request, added.index, added.seed, added.num_prompt_tokens, list(added.token_ids), tables)

    def _check_shape(self, plan: StepPlan) -> None:
        slots = plan.slots.tolist()
        if len(set(slots)) != len(slots):
            self._violation(f"a slot has two rows: {slots}")
        if not set(slots) <= self._slots.keys():
            self._violation(f"rows without a slot: {slots}, known {sorted(self._slots)}")
        if {added.slot for added in plan.added} - set(slots):
            self._violation("a sequence was added without a row")
        if plan.num_rows == 0 and plan.transfers is not None and self._transfers is not None:
            return
        if plan.num_rows == 0 or int(plan.num_new.min()) < 1:
            self._violation(f"rows with {plan.num_new.tolist()} tokens")
        if self._budget is not None and plan.num_tokens > self._budget:
            self._violation(f"{plan.num_tokens} tokens, budget {self._budget}")
        limit = self._max_num_seqs
        if limit is not None and (plan.num_rows > limit or len(self._slots) > limit or max(slots) >= limit):
            self._violation(f"slots {sorted(self._slots)}, limit {limit}")

    def _write(self, slot: int, start: int, end: int, writers: dict[tuple[int, int], int]) -> None:
        state = self._slots[slot]
        if end > len(state.tokens):
            self._violation(f"slot {slot} computes up to {end} of {len(state.tokens)} known tokens")
        hashes = state.hashes_up_to(end)
        block_size = self._layout.block_size
        for table in state.tables:
            for position in range(start, end):
                column, offset = divmod(position, block_size)
                block = table[column] if column < len(table) else 0
                if block == 0:
                    self._violation(f"slot {slot}: no block for position {position}")
                if writers.setdefault((block, offset), slot) != slot:
                    self._violation(f"block {block} is written by slots {writers[block, offset]} and {slot}")
                self._cache[block, offset] = hashes[position]

    def _check_reads(self, slot: int, end: int) -> None:
        """Every position that the last token attends to must hold what this sequence has put there."""
        state = self._slots[slot]
        hashes = np.array(state.hashes[:end], np.int64)
        for group, table in zip(self._layout.groups, state.tables, strict=True):
            window = group.spec.sliding_window
            first = 0 if window is None else max(0, end - window)
            positions = np.arange(first, end)
            blocks = np.array(table)[positions // self._layout.block_size]
            held = self._cache[blocks, positions % self._layout.block_size]
            wrong = np.flatnonzero((held != hashes[first:]) | (blocks == 0))
            if len(wrong):
                self._violation(
                    f"slot {slot} ({state.request.request_id}/{state.index}): position {first + int(wrong[0])} of "
                    f"{end} holds something else in block {int(blocks[wrong[0]])}"
                )

    def _sample(self, state: _Slot, end: int, result: StepResult, row: int, mask: IntArray | None) -> int:
        if end != len(state.tokens):
            self._violation(f"row {row} samples at {end} of {len(state.tokens)} tokens")
        if (mask is None) != (state.request.grammar is None):
            self._violation(f"row {row}: a mask without a grammar, or the other way round")
        token = sample(state.hashes[end - 1], state.seed, mask)
        state.tokens.append(token)
        if state.request.sampling_params.logprobs is not None:
            result.logprobs[row] = _logprobs(token)
        return token


def _mask(plan: StepPlan, row: int) -> IntArray | None:
    if plan.grammar_rows is None or plan.grammar_masks is None or row not in plan.grammar_rows:
        return None
    mask: IntArray = plan.grammar_masks[plan.grammar_rows.tolist().index(row)]
    return mask


def _logprobs(token: int) -> PositionLogprobs:
    return PositionLogprobs([token], [-float(token)], [1])


def _prompt_logprobs(state: _Slot, start: int, end: int, result: StepResult, row: int) -> None:
    if state.request.sampling_params.prompt_logprobs is not None and start < state.num_prompt_tokens:
        known = state.tokens[start + 1 : min(end + 1, state.num_prompt_tokens)]
        result.prompt_logprobs[row] = [_logprobs(token) for token in known]


def _embed(state: _Slot, start: int, end: int, result: StepResult, row: int) -> None:
    pooling = state.request.pooling
    if pooling is None:
        return
    state.pooled += sum(map(_hidden_state, state.hashes[start:end]))
    if end >= state.num_prompt_tokens:
        last = _hidden_state(state.hashes[end - 1])
        result.embeddings[row] = [last if pooling == "last" else state.pooled / state.num_prompt_tokens]


class _Ready:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class NullExecutor(Executor):
    """Computes nothing: every row samples token `token`. For measuring what a step costs the host."""

    def __init__(self, token: int = 5, max_concurrent_steps: int = 1) -> None:
        self.max_concurrent_steps = max_concurrent_steps
        self._token = token

    def start(self, setup: WorkerSetup) -> WorkerReport:
        raise NotImplementedError("the null executor has no model to load")

    def allocate(self, layout: KVCacheLayout) -> None:
        """Nothing to allocate."""

    def submit(self, plan: StepPlan) -> Any:
        return _Ready(StepResult(np.where(plan.samples, self._token, -1).astype(np.int32)))

    def close(self) -> None:
        """Nothing to close."""
