"""Prepared launches: the first goes through Triton, the others straight to the compiled kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmkit_attention import triton_launch
from llmkit_attention.triton_launch import PreparedLaunch

GRID = (3, 2, 1)


class Kernel:
    """Takes the place of a kernel of Triton and of what it compiles to; notes how it is called."""

    def __init__(self, compiles: bool = True) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.compiled = Compiled(self) if compiles else None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert grid == GRID

        def launch(*arguments: Any, **constants: Any) -> Any:
            self.calls.append(("triton", (*arguments, *constants.values())))
            return self.compiled

        return launch


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert grid == GRID
        return lambda *arguments: self.kernel.calls.append(("compiled", arguments))


@pytest.fixture(autouse=True)
def _nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "_compiled", {})


MEMORY = torch.zeros(64)
OF_STEP = torch.zeros(16, dtype=torch.int32)


def prepared(kernel: Kernel, stride: int = 8, number: int = 5) -> PreparedLaunch:
    return PreparedLaunch(kernel, GRID, (OF_STEP,), (stride,), (number, 0.5), {"BLOCK": 16}, {"num_warps": 4})


def test_the_second_launch_hands_numbers_to_the_compiled_kernel() -> None:
    kernel = Kernel()
    launch = prepared(kernel)
    first, second = MEMORY[:16], MEMORY[16:32]
    launch(first)
    launch(second)
    (way, arguments), direct = kernel.calls
    assert way == "triton"
    assert arguments[0] is first
    assert arguments[1] is OF_STEP
    assert arguments[2:] == (8, 5, 0.5, 16, 4)
    assert direct == ("compiled", (second.data_ptr(), OF_STEP.data_ptr(), 8, 5, 0.5, 16))


def test_the_next_step_knows_the_kernel_already() -> None:
    kernel = Kernel()
    prepared(kernel)(MEMORY)
    prepared(kernel, number=6)(MEMORY)
    assert kernel.calls[1] == ("compiled", (MEMORY.data_ptr(), OF_STEP.data_ptr(), 8, 6, 0.5, 16))


def test_what_a_kernel_is_compiled_for_tells_kernels_apart() -> None:
    kernel = Kernel()
    prepared(kernel)(MEMORY)
    prepared(kernel, stride=9)(MEMORY)
    prepared(kernel)(MEMORY.half())
    assert [way for way, _ in kernel.calls] == ["triton"] * 3


def test_unaligned_tensors_always_go_through_triton() -> None:
    kernel = Kernel()
    launch = prepared(kernel)
    for tensor in (MEMORY, MEMORY[1:], MEMORY, MEMORY[3:]):
        launch(tensor)
    assert [way for way, _ in kernel.calls] == ["triton", "triton", "compiled", "triton"]


def test_an_interpreted_kernel_stays_interpreted() -> None:
    kernel = Kernel(compiles=False)
    launch = prepared(kernel)
    launch(MEMORY)
    launch(MEMORY)
    assert [way for way, _ in kernel.calls] == ["triton", "triton"]
