"""Decode steps on the CPU that run from a recording: the decoder's kernels, without the Python between them.

A recording belongs to a number of rows and a width of the block table. It reads static copies of the step's inputs,
so a replayed step copies its own there and starts the recorded kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from llmkit.hookspecs.attention import AttentionBatch
from llmkit.jit import runtime

if TYPE_CHECKING:
    from llmkit.execution.input_batch import StepInputs
    from llmkit.hookspecs.attention import AttentionBackend
    from llmkit.jit.recording import Arena, Recording

logger = logging.getLogger("llmkit.execution")

MOST_ROWS = 64  # beyond it the time between kernels is small beside that of the kernels
MOST_RECORDINGS = 128
_WIDTH = 64  # pages: block tables are recorded in multiples of it
_ARENA_BYTES = 1 << 30  # of addresses; memory is committed as recordings use it

Layers = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class RecordedStep:
    """A decode step of n rows: what it reads, and, once recorded, what computes it.

    metadata: what the attention backend planned for the static batches, one per KV group.
    """

    positions: torch.Tensor
    batches: tuple[AttentionBatch, ...]
    metadata: list[Any]
    hidden: torch.Tensor | None = None
    output: torch.Tensor | None = None
    recording: Recording | None = None


@dataclass
class _Seen:
    """A key that came up: recorded only when it comes again, as a batch that shrinks each step gains nothing."""

    steps: list[RecordedStep] = field(default_factory=list)


class StepReplayer:
    """Recordings of one runner. `backend` plans for the static inputs and says what they are good for."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self._seen: dict[tuple[int, int], _Seen] = {}
        self._num_recordings = 0
        self._arena: Arena | None = None
        self._cannot: str | None = None
        self._step: RecordedStep | None = None
        if runtime.loaded():  # the first decode must not wait for the compiler
            from llmkit.jit import recording

            recording.load()

    def begin(self, inputs: StepInputs, metadata: Sequence[Any]) -> RecordedStep | None:
        """The recorded (or about to be recorded) step that computes `inputs`, its static inputs filled; None if this
        step is to run as usual. `metadata`: what the backend planned for the step itself."""
        rows = inputs.batches[0].num_rows
        if self._cannot is not None or rows > MOST_ROWS or inputs.batches[0].max_query_len != 1:
            return None
        width = -(-inputs.batches[0].block_table.shape[1] // _WIDTH) * _WIDTH
        seen = self._seen.get((rows, width))
        if seen is None:
            if not all(self._backend.replays(plan, plan) for plan in metadata):
                self._cannot = "the attention backend's plans do not fit a recording"
            self._seen[rows, width] = _Seen()
            return None
        step = next((step for step in seen.steps if self._replays(step, metadata)), None)
        if step is not None:
            _fill(step, inputs)
        elif self._may_record():
            step = self._new_step(inputs, width)
            seen.steps.append(step)
        self._step = step
        return step

    def run(self, layers: Layers, hidden: torch.Tensor) -> torch.Tensor:
        """layers(positions, hidden) [n, hidden_size] of the step that `begin` has returned last."""
        step = self._step
        assert step is not None
        if step.recording is not None:
            assert step.hidden is not None
            assert step.output is not None
            step.hidden.copy_(hidden)
            step.recording.replay()
            return step.output
        return self._record(step, layers, hidden)

    def _record(self, step: RecordedStep, layers: Layers, hidden: torch.Tensor) -> torch.Tensor:
        from llmkit.jit.recording import Arena, CannotRecordError, record

        if self._arena is None:
            self._arena = Arena(_ARENA_BYTES)
        step.hidden = hidden.clone()
        static = step.hidden
        try:
            step.output, step.recording = record(self._arena, lambda: layers(step.positions, static))
        except CannotRecordError as error:
            logger.info("decode steps run without recordings: %s", error)
            self._cannot = str(error)
            self._seen.clear()
            return layers(step.positions, hidden)
        return step.output

    def _may_record(self) -> bool:
        self._num_recordings += 1
        if self._num_recordings <= MOST_RECORDINGS:
            return True
        self._seen.clear()
        self._num_recordings = 0
        return False

    def _replays(self, step: RecordedStep, metadata: Sequence[Any]) -> bool:
        return all(self._backend.replays(recorded, now) for recorded, now in zip(step.metadata, metadata, strict=True))

    def _new_step(self, inputs: StepInputs, width: int) -> RecordedStep:
        batches = tuple(_static_batch(batch, width) for batch in inputs.batches)
        step = RecordedStep(torch.empty_like(inputs.positions), batches, [])
        _fill(step, inputs)
        step.metadata = [self._backend.plan(batch) for batch in batches]
        return step


def _static_batch(batch: AttentionBatch, width: int) -> AttentionBatch:
    lengths = torch.empty_like(batch.seq_lens)
    return AttentionBatch(
        query_start_loc=batch.query_start_loc.clone(),
        seq_lens=lengths,
        block_table=torch.zeros((batch.num_rows, width), dtype=batch.block_table.dtype),
        slot_mapping=torch.empty_like(batch.slot_mapping),
        query_start_loc_np=np.array(batch.query_start_loc_np),
        seq_lens_np=lengths.numpy(),
        num_rows=batch.num_rows,
        num_tokens=batch.num_tokens,
        max_query_len=1,
        max_seq_len=width * batch.page_size,
        page_size=batch.page_size,
    )


def _fill(step: RecordedStep, inputs: StepInputs) -> None:
    step.positions.copy_(inputs.positions)
    for static, batch in zip(step.batches, inputs.batches, strict=True):
        static.seq_lens.copy_(batch.seq_lens)
        static.slot_mapping.copy_(batch.slot_mapping)
        static.block_table[:, : batch.block_table.shape[1]].copy_(batch.block_table)
