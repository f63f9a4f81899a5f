"""The kernel for prompts on Hopper: what it takes over, what happens where it does not work, and, on such a GPU, what
it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from llmkit.hookspecs.attention import AttentionLayer
from llmkit.jit import rehearsal
from llmkit.testing.attention import TOLERANCE, AttentionTrial, single_threaded

pytest.importorskip("triton")

from llmkit_attention import hopper_launch
from llmkit_attention.hopper_launch import HopperPrompts
from llmkit_attention.triton_prepare import OfStep
from llmkit_attention.triton_schedule import IntArray, Launch
from llmkit_attention.triton_tiles import Device, Tile

LAYER = AttentionLayer(0, 32, 8, 128, 128**-0.5)
H200 = Device(132, 232448, (9, 0))
REST = Launch(Tile(128, 64, 8, 3, True), 4, 128, 32, 8, 70, 1, 0, 64, min_tokens=4, max_tokens=9999, one_per_row=False)
PROMPTS = [2048] * 2 + [1] * 7  # tokens of the rows of a step
NUMBERS = torch.zeros(1, dtype=torch.int32)


class Kernel:
    """Takes the place of `prompt_kernel`, and of what it compiles to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self._error = error

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Kernel]:
        def launch(*arguments: Any, **constants: Any) -> Kernel:
            self.launches.append((grid, arguments, constants))
            if self._error is not None:
                raise self._error
            return self

        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return installed(monkeypatch, Kernel())


def installed(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> Kernel:
    monkeypatch.setattr(hopper_launch, "hopper_kernel", lambda: kernel)
    monkeypatch.setattr(hopper_launch, "_descriptor", lambda cache: cache)
    return kernel


def tensors(layer: AttentionLayer, dtype: torch.dtype, kv_dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """(query, kv_cache, output), of few tokens."""
    query = torch.zeros(2, layer.num_heads, layer.head_size, dtype=dtype)
    return query, torch.zeros(2, 2, layer.num_kv_heads, 16, layer.head_size, dtype=kv_dtype), query.clone()


def attends_with(
    prompts: HopperPrompts,
    layer: AttentionLayer = LAYER,
    tokens: list[int] = PROMPTS,
    device: Device = H200,
    planned: Launch = REST,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.bfloat16, torch.bfloat16),
) -> int:
    """Attend in two layers; how often that was left to the other kernel."""
    query_lens: IntArray = np.array(tokens, dtype=np.int32)
    query, cache, output = tensors(layer, *dtypes)
    step = OfStep(NUMBERS, NUMBERS, torch.zeros(len(tokens), 3, dtype=torch.int32), len(tokens))
    others = 0

    def other(*_: torch.Tensor) -> None:
        nonlocal others
        others += 1

    attend = prompts.take(planned, layer, query, cache, step, query_lens, device, lambda: other)
    for _ in range(2):
        attend(query, cache, output)
    return others


def test_rows_of_many_tokens_go_to_it(kernel: Kernel) -> None:
    assert not attends_with(HopperPrompts())
    (grid, arguments, constants), (grid_again, direct, none) = kernel.launches
    assert grid == grid_again == (132, 1, 1)
    assert len(direct) == len(arguments) + 6
    assert direct[-6:] == tuple(constants.values())[:6]  # num_warps is what it was compiled for
    assert not none
    assert arguments[-3:] == (9, (2 * 2048 + 7) // 32 + 9, 4)  # rows, query blocks, tokens of other rows at most
    assert constants["GROUP_SIZE"] == 4


@pytest.mark.parametrize(
    "changed",
    [
        {"layer": replace(LAYER, head_size=64)},
        {"layer": replace(LAYER, sliding_window=100)},
        {"layer": replace(LAYER, soft_cap=30.0)},
        {"layer": replace(LAYER, scale=-1.0)},
        {"layer": replace(LAYER, num_heads=128, num_kv_heads=1)},
        {"dtypes": (torch.float32, torch.float32)},
        {"dtypes": (torch.bfloat16, torch.float8_e4m3fn)},
        {"device": Device(132, 232448, (10, 0))},
        {"device": Device(132, 101376, (8, 9))},
        {"planned": replace(REST, one_per_row=True)},
        {"tokens": [512, 512, 256]},  # does not keep the GPU busy
    ],
)
def test_what_it_does_not_compute_or_not_faster_is_left_to_the_other(kernel: Kernel, changed: dict[str, Any]) -> None:
    assert attends_with(HopperPrompts(), **changed) == 2
    assert not kernel.launches


def test_another_release_of_triton_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_launch, "INTERPRETED", False)
    monkeypatch.setattr("triton.__version__", "99.0.0")
    hopper_launch.hopper_kernel.cache_clear()
    assert attends_with(HopperPrompts()) == 2
    hopper_launch.hopper_kernel.cache_clear()


def test_where_it_fails_the_other_goes_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    kernel = installed(monkeypatch, Kernel(AttributeError("gone")))
    prompts = HopperPrompts()
    with caplog.at_level("WARNING", "llmkit.attention"):
        assert attends_with(prompts) == 2
        assert attends_with(prompts) == 2
    assert len(kernel.launches) == 1
    assert [record.getMessage().endswith("gone") for record in caplog.records] == [True]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="there is no Hopper GPU"
)
class TestOnHopper:
    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Iterator[None]:
        with single_threaded():
            yield

    @pytest.mark.parametrize(
        ("num_heads", "num_kv_heads", "page_size", "dtype"),
        [(8, 2, 16, torch.bfloat16), (6, 1, 32, torch.float16), (2, 2, 128, torch.bfloat16)],
    )
    def test_random_rows(
        self, monkeypatch: pytest.MonkeyPatch, num_heads: int, num_kv_heads: int, page_size: int, dtype: torch.dtype
    ) -> None:
        """Prompts, chunks behind others, decodes; rows shorter than a page; the cache's unwritten slots are NaN."""
        from llmkit_attention.triton_backend import TritonAttention

        if hopper_launch.hopper_kernel() is None:
            pytest.skip("the kernel is not written in this Triton's Gluon")
        launched = 0

        def launch(*arguments: Any, **constants: Any) -> Any:
            nonlocal launched
            launched += 1
            return rehearsal.launch(*arguments, **constants)

        monkeypatch.setattr(hopper_launch, "launch", launch)
        monkeypatch.setattr(hopper_launch, "_LEAST_ROUNDS", 0)
        backend, random = TritonAttention(), np.random.default_rng(page_size)
        layer = AttentionLayer(0, num_heads, num_kv_heads, 128, 128**-0.5)
        run = AttentionTrial(backend, layer, page_size, dtype, dtype, "cuda", capacity=8000)
        steps = [[(0, 700), (1, 20), (2, 1)], [(1, 300), (3, 9), (0, 129), (2, 1)]]
        for _ in range(4):
            rows = random.permutation(8)[: random.integers(1, 6)]
            steps.append([(int(row), int(random.choice([1, 5, 31, 64, 128, 257, 400]))) for row in rows])
        for rows in steps:
            assert run.step(rows) < TOLERANCE[dtype]
        assert launched >= 2
        assert backend._hopper_prompts._works
