"""Kernels that run from a recording do what they did when it was made."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from llmkit.jit import runtime
from llmkit.jit.recording import Arena, CannotRecordError, record
from llmkit_kernels.cpu_table import CPUKernels


@pytest.fixture
def arena() -> Arena:
    return Arena(4 << 20)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield int(request.param)
    torch.set_num_threads(before)


def feed_forward(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Some layers, on one thread and on several, that need what those before have made."""
    table = CPUKernels()
    up, down = (table.arrange(torch.randn(shape) / 20, "linear") for shape in ((1024, 64), (64, 512)))
    weight = torch.rand(64) + 0.5

    def run() -> torch.Tensor:
        hidden, residual = table.rms_norm(x, weight, 1e-5), x
        for _ in range(5):
            hidden = table.arranged_linear(table.silu_and_mul(table.arranged_linear(hidden, up)), down)
            hidden, residual = table.add_rms_norm(hidden, residual, weight, 1e-5)
        return hidden

    return run


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_a_replay_computes_the_new_inputs(arena: Arena, threads: int, rows: int) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, 64)
    run = feed_forward(x)
    output, recording = record(arena, run)
    assert torch.equal(output, run())
    for _ in range(20):
        x.copy_(torch.randn(rows, 64))
        recording.replay()
        assert torch.equal(output, run()), threads


def test_recordings_share_an_arena(arena: Arena) -> None:
    inputs = [torch.randn(rows, 64) for rows in (3, 9)]
    runs = [feed_forward(x) for x in inputs]
    made = [record(arena, run) for run in runs]
    for _ in range(2):
        for (output, recording), run in zip(made, runs, strict=True):
            recording.replay()
            assert torch.equal(output, run())


def test_views_are_recorded_and_other_operations_refused(arena: Arena) -> None:
    table, x, weight = CPUKernels(), torch.randn(4, 128), torch.rand(64)

    def views() -> torch.Tensor:
        left, _ = torch.split(x.view(4, 2, 64).view(8, 64), [4, 4])
        return table.rms_norm(left, weight, 1e-5)

    output, recording = record(arena, views)
    x.copy_(torch.randn(4, 128))
    recording.replay()
    assert torch.equal(output, views())
    for function in (lambda: x + 1, lambda: x.add_(1), lambda: torch.empty(3), lambda: x[torch.tensor([1])]):
        with pytest.raises(CannotRecordError):
            record(arena, function)
    assert runtime.empty((2, 2)).shape == (2, 2)  # nothing is recorded any more
    assert torch.equal(output, views())


def test_the_first_recording_does_not_import_the_compiler_of_torch() -> None:
    # It would in the middle of the first answer, and takes seconds.
    code = """
import sys, torch
from llmkit.jit.recording import Arena, record
before = set(sys.modules)
x = torch.zeros(4, 4)
record(Arena(4096), lambda: x.view(16)[:3])
new = {name for name in set(sys.modules) - before if not name.startswith(("numba", "llvmlite", "llmkit"))}
print("torch._dynamo" in sys.modules, sorted(name for name in new if name.split(".")[0] in ("torch", "sympy")))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False []\n"


def test_an_arena_that_is_too_small_is_noticed() -> None:
    with pytest.raises(CannotRecordError, match="bytes"):
        record(Arena(4096), feed_forward(torch.randn(9, 64)))
