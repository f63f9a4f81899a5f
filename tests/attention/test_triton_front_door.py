"""The `triton` backend on a machine that cannot run it: what it says, and that `auto` passes it by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from llmkit.hookspecs import Environment
from llmkit.hookspecs.attention import AttentionQuery
from llmkit.registry import Registry
from llmkit_attention import triton_paged

GPU = Environment(device_type="cuda", compute_capability=(9, 0))
QUERY = AttentionQuery("cuda", (9, 0), torch.bfloat16, torch.bfloat16, 32, 8, 128)

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def _not_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    assert triton_paged.llmkit_problems(GPU) == []
    assert triton_paged.llmkit_problems(replace(GPU, compute_capability=None)) == []  # judged without a GPU
    (problem,) = triton_paged.llmkit_problems(Environment())
    assert "needs a CUDA GPU" in problem
    (problem,) = triton_paged.llmkit_problems(replace(GPU, compute_capability=(7, 5)))
    assert "7.5" in problem
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton_paged.llmkit_problems(Environment()) == []


def test_a_missing_library_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Environment, "has_module", lambda _, name: name != "triton")
    assert "needs triton, which is not installed" in triton_paged.llmkit_problems(GPU)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"device_type": "cpu", "compute_capability": None}, "not on cpu"),
        ({"compute_capability": (7, 0)}, "7.0"),
        ({"head_size": 288}, "head size 288"),
        ({"kv_dtype": torch.float8_e4m3fn, "compute_capability": (8, 6)}, "needs compute capability 8.9"),
        ({"kv_dtype": torch.float8_e5m2}, "float8_e5m2 is not"),
        ({"dtype": torch.float64}, "float64"),
        ({"num_heads": 33}, "33 query heads"),
    ],
)
def test_it_says_what_it_cannot_do(changes: dict[str, Any], part: str) -> None:
    (reason,) = triton_paged.llmkit_attention_backend().support(replace(QUERY, **changes)).reasons
    assert part in reason


def test_auto_prefers_it_to_the_reference_on_a_gpu_and_passes_it_by_on_the_cpu() -> None:
    registry = Registry.discover()

    def chosen(environment: Environment, query: AttentionQuery) -> str:
        registry.create("attention", "auto", environment, judge=lambda backend: backend.support(query))
        return registry.selections[-1].name

    assert chosen(GPU, QUERY) == "triton"
    assert chosen(GPU, replace(QUERY, kv_dtype=torch.float8_e4m3fn)) == "triton"
    assert chosen(GPU, replace(QUERY, head_size=288)) == "torch"
    on_cpu = replace(QUERY, device_type="cpu", compute_capability=None)
    assert chosen(Environment(cpu_flags=frozenset({"avx2", "f16c", "fma"})), on_cpu) == "cpu"
    assert "needs a CUDA GPU" in registry.selections[-1].rejected["triton"]
