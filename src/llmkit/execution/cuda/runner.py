"""The model runner of GPUs: a step is launched, and its tokens are read when somebody asks for them."""

from __future__ import annotations

import logging
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from llmkit.execution.cuda.capture_sizes import capture_sizes, common_sizes
from llmkit.execution.cuda.decode_graphs import Body, DecodeGraphs, Ending
from llmkit.execution.cuda.pending import HostMemory, HostTokens, LongArray, PendingLogprobs, PendingStep
from llmkit.execution.cuda.slot_state import SlotState
from llmkit.execution.cuda.static_inputs import StaticInputs, StaticStaging
from llmkit.execution.memory import readable
from llmkit.execution.model_runner import ModelRunner, checked_logits, forward_context, token_masks
from llmkit.execution.staging import StagingBuffer
from llmkit.execution.step_handle import FinishedStep
from llmkit.metrics.step_parts import part
from llmkit.sampling import parameters
from llmkit.sampling.device_draw import NOT_FINITE, draw_or_best
from llmkit.sampling.logprobs import device_logprobs
from llmkit.sampling.sampler import NOTHING_ALLOWED
from llmkit.scheduling.plan import StepResult

if TYPE_CHECKING:
    from llmkit.hookspecs.attention import AttentionBackend
    from llmkit.hookspecs.executor import StepHandle
    from llmkit.hookspecs.kernels import KernelTable
    from llmkit.jit.rehearsal import Rehearsal
    from llmkit.kv_cache.layout import KVCacheLayout
    from llmkit.layers.causal_lm import CausalLM
    from llmkit.sampling.device_draw import DeviceDraws
    from llmkit.scheduling.plan import IntArray, StepPlan

logger = logging.getLogger("llmkit.execution")

DRAWN_IN_GRAPHS = parameters.RANDOM | parameters.MIN_P | parameters.TRUNCATED
"""What rows may need for a graph to end in their tokens."""

KNOWS_TOKENS = parameters.BANNED
"""What needs the tokens so far on the host."""


class CudaModelRunner(ModelRunner):
    """Launches steps ahead of their results where it can.

    It can if what a step depends on besides sampled tokens is known beforehand, which it is unless hidden states are
    wanted (scores of prompts, embeddings), blocks are transferred, or words are forbidden that depend on the tokens so
    far. Such a step first waits for those under way; the first kinds then run as in `ModelRunner`.
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
        self._device = device
        self._most_rows = capture_sizes(max_num_seqs)[-1]
        self._state = SlotState(max_num_seqs, self._vocab_size, device, kernels)
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
            self._graphs = DecodeGraphs(static, sizes, common_sizes(max_num_seqs), self._body, device)
        self._logits = torch.empty(0, self._vocab_size, dtype=torch.float32, device=device)

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

    @torch.inference_mode()
    def rehearse(self, rehearsal: Rehearsal) -> None:
        """In this rehearsal, which is entered: have all kernels compiled that `warm_up` launches. The cache needs two
        blocks. The runner has no graphs afterwards, so that its memory is free once nobody has it."""
        graphs, self._graphs = self._graphs, None
        if graphs is not None:
            graphs.rehearse(rehearsal)

    @torch.inference_mode()
    def warm_up(self) -> None:
        if self._graphs is None or self._device.type != "cuda":
            return
        start, before = perf_counter(), torch.cuda.memory_reserved(self._device)
        self._graphs.warm_up()
        torch.cuda.synchronize(self._device)
        took = torch.cuda.memory_reserved(self._device) - before
        logger.info(
            "%d graphs of decode steps captured in %.1f s; they take %s",
            self._graphs.num_captured, perf_counter() - start, readable(took),
        )  # fmt: skip

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
        return bool(plan.num_rows) and not (self._prompt_scorer.wants_any or self._pooler.wants_any)

    def _launch(self, plan: StepPlan) -> StepHandle:
        needs = int(np.bitwise_or.reduce(self._sampler.params.needs[plan.slots]))
        if needs & KNOWS_TOKENS:
            self.settle()
        ending = Ending.TRUNCATED if needs & parameters.TRUNCATED else Ending.DRAWN
        if needs & ~DRAWN_IN_GRAPHS or plan.grammar_rows is not None:
            ending = Ending.LOGITS
        if self._graphs is not None and int(plan.num_new.max()) == 1 and bool(plan.samples.all()):
            start = perf_counter()
            pages = -(-(int(plan.num_computed.max()) + 1) // self._page_size)
            launched = self._graphs.run(plan, pages, ending)
            self._forward_timing.add(perf_counter() - start)
            if launched is not None:
                inputs, output = launched
                if ending is not Ending.LOGITS:
                    return self._await(plan, output)
                return self._process(
                    plan, output, inputs.slots[: plan.num_rows], inputs.next_positions[: plan.num_rows]
                )
        logits, slots, draws = self._launch_kernels(plan, truncated=ending is Ending.TRUNCATED)
        with part("sample"):
            if ending is Ending.LOGITS and len(slots):
                return self._process(plan, logits.float(), slots, draws.positions)
            return self._await(plan, self._drawn(logits, draws) if len(slots) else slots)

    def _launch_kernels(self, plan: StepPlan, *, truncated: bool) -> tuple[torch.Tensor, torch.Tensor, DeviceDraws]:
        """Any step, kernel by kernel: the scores [s, v] of rows that sample, their slots int64[s], and how their tokens
        are drawn. truncated: whether any of them has top-k or top-p."""
        with part("inputs"):
            inputs = self._batch.prepare(plan)
        start = perf_counter()
        with part("attention plan"):
            metadata = [self._backend.plan(batch) for batch in inputs.batches]
        planned = perf_counter()
        self._plan_timing.add(planned - start)
        context = forward_context(self._backend, metadata, self._group_of_layer, self.kv.layers)
        context.output_rows = self._output_rows(inputs)
        rows = inputs.sampling_rows
        host = self._staging.layout({"slots": (np.int64, (len(rows),)), "positions": (np.int64, (len(rows),))})
        host["slots"][:], host["positions"][:] = plan.slots[rows], inputs.sampled_positions
        sent = self._staging.send()
        slots = sent["slots"]
        with part("forward"):
            input_ids, of_rows = self._state.enter(inputs.input_ids, slots, truncated=truncated)
            hidden = self._model.forward(input_ids, inputs.positions, context)
        self._forward_timing.add(perf_counter() - planned)
        draws = of_rows.at(sent["positions"], self._state.last_tokens(slots))
        if not len(rows):
            return self._logits[:0], slots, draws
        chosen = hidden if inputs.logits_indices is None or len(hidden) == len(rows) else hidden[inputs.logits_indices]
        with part("logits"):
            logits = checked_logits(self._model.scores(chosen), len(rows), self._vocab_size)
        return logits, slots, draws

    def _body(self, inputs: StaticInputs, ending: Ending) -> Body:
        """What a graph of decode steps with these inputs is made of."""
        metadata = [self._backend.plan(batch) for batch in inputs.batches]
        context = forward_context(self._backend, metadata, self._group_of_layer, self.kv.layers)
        rows = len(inputs.slots)
        if ending is Ending.LOGITS and not len(self._logits):  # one for all graphs: no two of them run at once
            self._logits = torch.empty(self._most_rows, self._vocab_size, dtype=torch.float32, device=self._device)

        def follow(lengths: IntArray) -> None:
            for planned in metadata:
                self._backend.follow(planned, lengths)

        def launch() -> torch.Tensor:
            truncated = ending is Ending.TRUNCATED
            input_ids, of_rows = self._state.enter(inputs.input_ids, inputs.slots, truncated=truncated)
            hidden = self._model.forward(input_ids, inputs.positions, context)
            logits = checked_logits(self._model.scores(hidden), rows, self._vocab_size)
            if ending is Ending.LOGITS:
                return self._logits[:rows].copy_(logits)
            return self._drawn(logits, of_rows.at(inputs.next_positions, self._state.last_tokens(inputs.slots)))

        return Body(launch, follow)

    def _drawn(self, logits: torch.Tensor, draws: DeviceDraws) -> torch.Tensor:
        """Tokens int64[n] of scores [n, v]."""
        tokens = self._kernels.draw(logits, draws)
        return draw_or_best(logits.float(), draws) if tokens is None else tokens

    def _process(
        self, plan: StepPlan, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> PendingStep:
        """What follows after the logits where some rows have them changed or reported."""
        rows = np.flatnonzero(plan.samples).astype(np.int32)
        host_slots = plan.slots[rows]
        needs = self._sampler.params.needs[host_slots]
        every = int(np.bitwise_or.reduce(needs))
        usable = self._sampler.process(
            logits, host_slots, (plan.num_computed + plan.num_new)[rows], token_masks(plan, rows)
        )
        draws = self._state.parameters(slots, truncated=bool(every & parameters.TRUNCATED)).at(positions)
        tokens = self._drawn(logits, draws)
        tokens = torch.where(usable, torch.where(tokens < 0, NOTHING_ALLOWED, tokens), NOT_FINITE)
        real = tokens.clamp(min=0)
        self._sampler.record(host_slots, real)
        self._state.last_tokens(slots).note(tokens)
        logprobs = None
        wanted = np.flatnonzero(needs & parameters.LOGPROBS)
        if len(wanted):
            some = torch.from_numpy(wanted).to(logits.device)
            of_rows = device_logprobs(
                logits[some], real[some], self._sampler.params.num_logprobs[host_slots[wanted]].tolist()
            )
            logprobs = PendingLogprobs.sent(wanted.astype(np.int32), of_rows)
        return self._await(plan, tokens, logprobs)

    def _await(self, plan: StepPlan, tokens: torch.Tensor, logprobs: PendingLogprobs | None = None) -> PendingStep:
        """Send the tokens to the host, where placeholders stand for them until they are there."""
        rows = np.flatnonzero(plan.samples).astype(np.int32)
        slots, positions = plan.slots[rows], (plan.num_computed + plan.num_new)[rows]
        self._batch.token_ids[slots, positions] = -1 - slots
        occupants = self._occupants[slots]
        memory = self._host_memory.take()

        def settled(step: PendingStep, codes: LongArray) -> None:
            if step not in self._pending:
                return
            self._pending.remove(step)
            self._host_memory.give_back(memory)
            self._fill_in(slots, positions, occupants, codes)

        step = PendingStep(plan.num_rows, rows, HostTokens(memory, tokens), settled, logprobs)
        self._pending.append(step)
        return step

    def _fill_in(self, slots: IntArray, positions: IntArray, occupants: LongArray, codes: LongArray) -> None:
        """Put tokens in the place of their placeholders, unless the slot belongs to another sequence by now."""
        same = self._occupants[slots] == occupants
        self._batch.token_ids[slots[same], positions[same]] = np.maximum(codes[same], 0)
