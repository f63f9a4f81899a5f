"""Kernels of Triton where there is no GPU: their tests, interpreted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).parents[1]
# file → tests in it that run where kernels are interpreted, at least
FILES = {
    "kernels/test_triton_draw.py": 25,
    "kernels/test_triton_few_rows.py": 20,
    "kernels/test_triton_kernels.py": 20,
    "kernels/test_triton_some_rows.py": 15,
    "quantization/test_fp8.py": 30,
}


@pytest.mark.long
def test_under_the_interpreter(interpreted: Callable[..., list[str]]) -> None:
    passed = interpreted(*(TESTS / name for name in FILES))
    counts = {name: sum(test.startswith(f"tests/{name}::") for test in passed) for name in FILES}
    assert all(counts[name] >= least for name, least in FILES.items()), f"tests of the kernels were skipped: {counts}"
