"""One step on the device: apply the plan's changes, one forward pass, sample."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from llmkit.errors import EngineError
from llmkit.execution.input_batch import InputBatch, StepInputs
from llmkit.execution.kv_tensors import KVTensors
from llmkit.execution.pooling import Pooler
from llmkit.execution.prompt_scoring import PromptScorer
from llmkit.execution.replay import StepReplayer
from llmkit.execution.step_handle import FinishedStep
from llmkit.layers.context import ForwardContext
from llmkit.metrics.step_parts import part
from llmkit.registry.timings import CallTiming
from llmkit.sampling.masks import TokenMasks
from llmkit.sampling.sampler import Sampler
from llmkit.scheduling.plan import StepResult

if TYPE_CHECKING:
    from llmkit.execution.worker_transfers import WorkerTransfers
    from llmkit.hookspecs.attention import AttentionBackend
    from llmkit.hookspecs.executor import StepHandle
    from llmkit.kv_cache.layout import KVCacheLayout
    from llmkit.layers.causal_lm import CausalLM
    from llmkit.scheduling.plan import IntArray, StepPlan

WORTH_LEAVING_OUT = 32  # tokens


class ModelRunner:
    """Owns the batch, the sampler and the KV tensors of one device."""

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        layout: KVCacheLayout,
        *,
        vocab_size: int,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        model_calls: dict[str, CallTiming] | None = None,
        attention_calls: dict[str, CallTiming] | None = None,
    ) -> None:
        """model_calls, attention_calls: take count and host time of what is called once a step."""
        self._model = model
        self._forward_timing = _timing(model_calls, "forward")
        self._plan_timing = _timing(attention_calls, "plan")
        self._vocab_size = vocab_size
        self._backend = backend
        self._batch = InputBatch(layout, max_num_seqs, max_model_len, device, backend.prefix_sharing)
        self.kv = KVTensors(layout, backend, device)
        self._group_of_layer = groups_by_layer(layout)
        self._replayer = StepReplayer(backend) if device.type == "cpu" else None
        self._sampler = Sampler(self._batch.token_ids, vocab_size, device)
        self._prompt_scorer = PromptScorer(model, self._batch.token_ids, vocab_size)
        self._pooler = Pooler()
        self.transfers: WorkerTransfers | None = None

    @property
    def kv_caches(self) -> list[torch.Tensor]:
        """The cache of each attention layer."""
        return self.kv.layers

    def warm_up(self) -> None:
        """Do once what would otherwise make the first steps wait."""

    def submit(self, plan: StepPlan) -> StepHandle:
        """`execute`, with a handle that holds the result. Another runner's may still be waiting for it."""
        return FinishedStep(self.execute(plan))

    def settle(self) -> None:
        """Wait for the steps under way; here a step is done when `submit` returns."""

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. A row whose logits are unusable fails alone; everything else that goes wrong is raised."""
        result = StepResult(token_ids=np.full(plan.num_rows, -1, dtype=np.int32))
        transfers = self.transfers
        if transfers is None:
            self._apply(plan)
            self._run(plan, self._backend, result)
            return result
        try:
            self._apply(plan)
        except BaseException:
            transfers.skip(plan.transfers)
            raise
        transfers.begin(plan.transfers)
        try:
            self._run(plan, transfers.watched(self._backend), result)
        except BaseException:
            transfers.break_off()
            raise
        result.transfers = transfers.finish()
        result.transfer_faults = transfers.take_faults()
        return result

    def _run(self, plan: StepPlan, backend: AttentionBackend, result: StepResult) -> None:
        if not plan.num_rows:
            return
        with part("inputs"):
            inputs = self._batch.prepare(plan)
        start = perf_counter()
        with part("attention plan"):
            metadata = [self._backend.plan(batch) for batch in inputs.batches]
        planned = perf_counter()
        self._plan_timing.add(planned - start)
        replayer = None if self._pooler.wants_any or backend is not self._backend else self._replayer
        recorded = replayer.begin(inputs, metadata) if replayer is not None else None
        if recorded is not None:
            metadata = recorded.metadata
        context = forward_context(backend, metadata, self._group_of_layer, self.kv.layers)
        context.output_rows = self._output_rows(inputs)
        context.replayer = self._replayer if recorded is not None else None
        with part("forward"):
            hidden = self._model.forward(inputs.input_ids, inputs.positions, context)
        self._forward_timing.add(perf_counter() - planned)
        self._prompt_scorer.score(plan, hidden, result)
        self._pooler.pool(plan, hidden, result)
        if len(inputs.sampling_rows):
            with part("sample"):
                self._sample(plan, inputs, hidden, result)

    def _output_rows(self, inputs: StepInputs) -> torch.Tensor | None:
        """The tokens whose hidden states are read, if the others are worth leaving out of what nobody reads."""
        indices = inputs.logits_indices
        if indices is None or self._prompt_scorer.wants_any or self._pooler.wants_any:
            return None
        if len(inputs.input_ids) - len(indices) < WORTH_LEAVING_OUT:
            return None
        return indices if len(indices) else torch.zeros(1, dtype=torch.int64, device=indices.device)

    def _apply(self, plan: StepPlan) -> None:
        for slot in plan.removed_slots:
            self._sampler.remove(slot)
            self._prompt_scorer.remove(slot)
            self._pooler.remove(slot)
        for row in plan.added:
            self._batch.add(row)
            self._sampler.add(row)
            self._prompt_scorer.add(row)
            self._pooler.add(row)
        self._batch.update(plan.block_updates)
        self.kv.swap(plan.swaps_out, plan.swaps_in)
        self.kv.copy_blocks(plan.block_copies)

    def _sample(self, plan: StepPlan, inputs: StepInputs, hidden: torch.Tensor, result: StepResult) -> None:
        rows = inputs.sampling_rows
        chosen = hidden if inputs.logits_indices is None or len(hidden) == len(rows) else hidden[inputs.logits_indices]
        with part("logits"):
            logits = checked_logits(self._model.logits(chosen), len(rows), self._vocab_size)
        masks = token_masks(plan, rows)
        sampled = self._sampler.sample(logits, plan.slots[rows], inputs.sampled_positions, masks)
        result.token_ids[rows] = sampled.token_ids
        self._batch.record(plan, rows, sampled.token_ids)
        result.logprobs.update({int(rows[i]): entry for i, entry in sampled.logprobs.items()})
        result.failed.update({int(rows[i]): message for i, message in sampled.failed.items()})


def checked_logits(logits: torch.Tensor, rows: int, vocab_size: int) -> torch.Tensor:
    """logits [rows, vocab_size] as they are. Raises EngineError for another shape."""
    if logits.shape != (rows, vocab_size):
        raise EngineError(
            f"The model returned logits of shape {tuple(logits.shape)} for {rows} tokens and a vocabulary of "
            f"{vocab_size}."
        )
    return logits


def token_masks(plan: StepPlan, sampling_rows: IntArray) -> TokenMasks | None:
    """The plan's masks by row of the logits; None if there are none."""
    if plan.grammar_rows is None or plan.grammar_masks is None:
        return None
    return TokenMasks(np.searchsorted(sampling_rows, plan.grammar_rows), plan.grammar_masks)


def forward_context(
    backend: AttentionBackend,
    metadata: Sequence[Any],
    group_of_layer: Sequence[int],
    kv_caches: list[torch.Tensor],
) -> ForwardContext:
    """metadata: what `backend.plan` has returned, once a group; the layers of a group share it."""
    return ForwardContext(backend, [metadata[group] for group in group_of_layer], kv_caches)


def _timing(calls: dict[str, CallTiming] | None, name: str) -> CallTiming:
    return CallTiming() if calls is None else calls.setdefault(name, CallTiming())


def groups_by_layer(layout: KVCacheLayout) -> list[int]:
    """The KV group of every attention layer."""
    group_of = layout.group_of_layer()
    return [group_of[layer] for layer in sorted(group_of)]
