"""The model runner of GPUs: a step is launched, and its tokens are read when somebody asks for them."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from llmkit.execution.cuda.capture_sizes import capture_sizes
from llmkit.execution.cuda.decode_graphs import Body, DecodeGraphs
from llmkit.execution.cuda.pending import HostMemory, HostTokens, LongArray, PendingStep
from llmkit.execution.cuda.slot_state import SlotState
from llmkit.execution.cuda.static_inputs import StaticInputs, StaticStaging
from llmkit.execution.model_runner import ModelRunner, checked_logits, forward_context
from llmkit.execution.staging import StagingBuffer
from llmkit.execution.step_handle import FinishedStep
from llmkit.sampling import parameters
from llmkit.sampling.device_draw import draw_or_best
from llmkit.scheduling.plan import StepResult

if TYPE_CHECKING:
    from llmkit.hookspecs.attention import AttentionBackend
    from llmkit.hookspecs.executor import StepHandle
    from llmkit.hookspecs.kernels import KernelTable
    from llmkit.kv_cache.layout import KVCacheLayout
    from llmkit.layers.causal_lm import CausalLM
    from llmkit.scheduling.plan import IntArray, StepPlan

DRAWN_ON_DEVICE = parameters.RANDOM | parameters.MIN_P
"""What rows may need for their step to be launched without waiting."""


class CudaModelRunner(ModelRunner):
    """Launches steps ahead of their results where it can.

    It can if what a step depends on besides sampled tokens is known beforehand: rows that take the best token or draw
    with temperature and min_p. A step with other wishes (logprobs, penalties, grammars, top-k, embeddings, transfers)
    first waits for those under way, then runs as in `ModelRunner`.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        layout: KVCacheLayout,
        *,
        kernels: KernelTable,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        **rest: Any,
    ) -> None:
        super().__init__(
            model, backend, layout, max_num_seqs=max_num_seqs, max_model_len=max_model_len, device=device, **rest
        )
        self._kernels = kernels
        self._page_size = layout.page_size
        self._state = SlotState(max_num_seqs, device)
        self._staging = StagingBuffer(device)
        self._host_memory = HostMemory(max_num_seqs, pinned=device.type == "cuda")
        self._pending: deque[PendingStep] = deque()
        self._occupants = np.zeros(max_num_seqs, dtype=np.int64)  # sequences that each slot has had
        self._graphs: DecodeGraphs | None = None
        if backend.graph_safe:
            sizes = capture_sizes(max_num_seqs)
            static = StaticStaging(
                self._batch, layout.page_size, sizes[-1], self._state.scratch, max_model_len + 1, device
            )
            self._graphs = DecodeGraphs(static, sizes, self._body, device)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> StepHandle:
        """Launch a step, behind those under way. Raises as `execute` does, or its handle does."""
        if self.transfers is not None:
            self.settle()
            return FinishedStep(self.execute(plan))
        self._apply(plan)
        if self._is_launched_ahead(plan):
            return self._launch(plan)
        self.settle()
        result = StepResult(token_ids=np.full(plan.num_rows, -1, dtype=np.int32))
        self._run(plan, self._backend, result)
        return FinishedStep(result)

    def settle(self) -> None:
        """Wait for the steps under way; their tokens are then in the host's buffer."""
        while self._pending:
            self._pending[0].result()

    def _apply(self, plan: StepPlan) -> None:
        super()._apply(plan)
        if plan.added:
            slots = np.array([row.slot for row in plan.added], dtype=np.int32)
            self._occupants[slots] += 1
            self._state.set(slots, self._sampler.params)

    def _is_launched_ahead(self, plan: StepPlan) -> bool:
        if not plan.num_rows or plan.grammar_rows is not None:
            return False
        if self._prompt_scorer.wants_any or self._pooler.wants_any:
            return False
        needs = np.bitwise_or.reduce(self._sampler.params.needs[plan.slots])
        return not int(needs) & ~DRAWN_ON_DEVICE

    def _launch(self, plan: StepPlan) -> StepHandle:
        tokens = None
        if self._graphs is not None and int(plan.num_new.max()) == 1 and bool(plan.samples.all()):
            start = perf_counter()
            tokens = self._graphs.run(plan, -(-(int(plan.num_computed.max()) + 1) // self._page_size))
            self._forward_timing.add(perf_counter() - start)
        if tokens is None:
            tokens = self._launch_kernels(plan)
        return self._await(plan, tokens)

    def _launch_kernels(self, plan: StepPlan) -> torch.Tensor:
        """Any step, kernel by kernel; the sampled tokens int64[s]."""
        inputs = self._batch.prepare(plan)
        start = perf_counter()
        metadata = [self._backend.plan(batch) for batch in inputs.batches]
        planned = perf_counter()
        self._plan_timing.add(planned - start)
        context = forward_context(self._backend, metadata, self._group_of_layer, self._kv.layers)
        context.output_rows = self._output_rows(inputs)
        hidden = self._model.forward(self._state.resolved(inputs.input_ids), inputs.positions, context)
        self._forward_timing.add(perf_counter() - planned)
        rows = inputs.sampling_rows
        host = self._staging.layout({"slots": (np.int64, (len(rows),)), "positions": (np.int64, (len(rows),))})
        host["slots"][:], host["positions"][:] = plan.slots[rows], inputs.sampled_positions
        sent = self._staging.send()
        if not len(rows):
            return sent["slots"]
        chosen = hidden if inputs.logits_indices is None or len(hidden) == len(rows) else hidden[inputs.logits_indices]
        return self._sampled(chosen, sent["slots"], sent["positions"])

    def _body(self, inputs: StaticInputs) -> Body:
        """What a graph of decode steps with these inputs is made of."""
        metadata = [self._backend.plan(batch) for batch in inputs.batches]
        context = forward_context(self._backend, metadata, self._group_of_layer, self._kv.layers)

        def run() -> torch.Tensor:
            hidden = self._model.forward(self._state.resolved(inputs.input_ids), inputs.positions, context)
            return self._sampled(hidden, inputs.slots, inputs.next_positions)

        return run

    def _sampled(self, hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits = checked_logits(self._model.logits(hidden), len(slots), self._vocab_size)
        draws = self._state.draws(slots, positions)
        tokens = self._kernels.draw(logits, draws)
        if tokens is None:
            tokens = draw_or_best(logits, draws)
        self._state.record(slots, tokens)
        return tokens

    def _await(self, plan: StepPlan, tokens: torch.Tensor) -> PendingStep:
        """Send the tokens to the host, where placeholders stand for them until they are there."""
        rows = np.flatnonzero(plan.samples).astype(np.int32)
        slots, positions = plan.slots[rows], (plan.num_computed + plan.num_new)[rows]
        self._batch.token_ids[slots, positions] = -1 - slots
        occupants = self._occupants[slots]
        memory = self._host_memory.take()

        def settled(step: PendingStep, codes: LongArray) -> None:
            self._pending.remove(step)
            self._host_memory.give_back(memory)
            self._fill_in(slots, positions, occupants, codes)

        step = PendingStep(plan.num_rows, rows, HostTokens(memory, tokens), settled)
        self._pending.append(step)
        return step

    def _fill_in(self, slots: IntArray, positions: IntArray, occupants: LongArray, codes: LongArray) -> None:
        """Put tokens in the place of their placeholders, unless the slot belongs to another sequence by now."""
        same = self._occupants[slots] == occupants
        self._batch.token_ids[slots[same], positions[same]] = np.maximum(codes[same], 0)
