"""Decode steps from recordings: when they are made, when they are used, and that they change nothing."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from llmkit.execution.replay import MOST_RECORDINGS, MOST_ROWS, StepReplayer
from llmkit.hookspecs.attention import AttentionBackend, AttentionBatch
from llmkit_kernels.cpu_table import CPUKernels


class Backend(AttentionBackend):
    """Plans are (the batch, a number that must be the same for a recording to fit)."""

    version = 0

    def support(self, query: Any) -> Any:
        raise NotImplementedError

    def plan(self, batch: AttentionBatch) -> tuple[AttentionBatch, int]:
        return batch, self.version

    def replays(self, recorded: Any, metadata: Any) -> bool:
        return bool(recorded[1] == metadata[1])

    def forward(self, *arguments: Any) -> torch.Tensor:
        raise NotImplementedError


def inputs(rows: int, pages: int = 3, query_len: int = 1) -> Any:
    lens = torch.randint(1, 40, (rows,), dtype=torch.int32)
    batch = AttentionBatch(
        query_start_loc=torch.arange(rows + 1, dtype=torch.int32),
        seq_lens=lens,
        block_table=torch.randint(0, 9, (rows, pages), dtype=torch.int32),
        slot_mapping=torch.randint(0, 99, (rows,)),
        query_start_loc_np=np.arange(rows + 1, dtype=np.int32),
        seq_lens_np=lens.numpy(),
        num_rows=rows,
        num_tokens=rows,
        max_query_len=query_len,
        max_seq_len=40,
        page_size=16,
    )
    return SimpleNamespace(positions=torch.randint(0, 40, (rows,)), batches=(batch,))


class Stepper:
    """Runs steps of a model that norms its input; counts how often the model was called as it is."""

    def __init__(self) -> None:
        self.backend = Backend()
        self.replayer = StepReplayer(self.backend)
        self.calls = 0
        self._weight = torch.rand(32)

    def layers(self, _positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return CPUKernels().rms_norm(hidden, self._weight, 1e-5)

    def step(self, given: Any, layers: Callable[..., torch.Tensor] | None = None) -> Any:
        """The recorded step, None if there was none; checks the result."""
        step = self.replayer.begin(given, [self.backend.plan(batch) for batch in given.batches])
        hidden = torch.randn(len(given.positions), 32)
        if step is not None:
            expected = CPUKernels().rms_norm(hidden, self._weight, 1e-5)
            assert torch.equal(self.replayer.run(layers or self.layers, hidden), expected)
        return step


def test_recorded_the_second_time_replayed_from_the_third() -> None:
    stepper = Stepper()
    assert stepper.step(inputs(4)) is None
    first = stepper.step(inputs(4))
    assert first is not None
    assert stepper.calls == 1
    for _ in range(3):
        assert stepper.step(inputs(4)) is first
    assert stepper.calls == 1
    assert stepper.step(inputs(5)) is None


def test_the_step_s_inputs_are_in_the_static_batch() -> None:
    stepper = Stepper()
    for _ in range(4):
        given = inputs(4, pages=5)
        step = stepper.step(given)
    (static,), (batch,) = step.batches, given.batches
    assert torch.equal(step.positions, given.positions)
    assert torch.equal(static.seq_lens, batch.seq_lens)
    assert static.seq_lens_np.tolist() == batch.seq_lens.tolist()
    assert torch.equal(static.slot_mapping, batch.slot_mapping)
    assert torch.equal(static.block_table[:, :5], batch.block_table)
    assert step.metadata[0][0] is static


def test_a_plan_that_a_recording_does_not_fit_gets_one_of_its_own() -> None:
    stepper = Stepper()
    stepper.step(inputs(4))
    first = stepper.step(inputs(4))
    stepper.backend.version = 1
    second = stepper.step(inputs(4))
    assert second is not first
    stepper.backend.version = 0
    assert stepper.step(inputs(4)) is first


@pytest.mark.parametrize("given", [inputs(4, query_len=2), inputs(MOST_ROWS + 1)], ids=["prefill", "many rows"])
def test_other_steps_run_as_usual(given: Any) -> None:
    stepper = Stepper()
    assert [stepper.step(given) for _ in range(3)] == [None] * 3


def test_longer_tables_have_recordings_of_their_own() -> None:
    stepper = Stepper()
    steps = [stepper.step(inputs(2, pages)) for pages in (3, 64, 65, 65, 64)]
    assert steps[0] is None
    assert steps[2] is None
    assert steps[1] is steps[4]
    assert steps[3].batches[0].block_table.shape == (2, 128)


def test_a_model_that_cannot_be_recorded_is_asked_once() -> None:
    stepper = Stepper()

    def layers(positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return stepper.layers(positions, hidden * 1)

    stepper.step(inputs(4), layers)
    assert stepper.step(inputs(4), layers) is not None
    assert stepper.step(inputs(4), layers) is None


def test_a_backend_that_never_fits_a_recording_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper, asked = Stepper(), []
    monkeypatch.setattr(Backend, "replays", lambda *_: bool(asked.append(1)))
    assert [stepper.step(inputs(4)) for _ in range(4)] == [None] * 4
    assert len(asked) == 1


def test_recordings_do_not_grow_without_bound() -> None:
    stepper = Stepper()
    for version in range(2 * MOST_RECORDINGS + 5):
        stepper.backend.version = version
        stepper.step(inputs(1))
    assert sum(len(seen.steps) for seen in stepper.replayer._seen.values()) <= MOST_RECORDINGS
    assert stepper.step(inputs(1)) is not None
