"""`import llmkit`: quick, light, and everything there."""

from __future__ import annotations

import subprocess
import sys

import pytest

import llmkit


def test_every_public_name_exists():
    assert set(llmkit._HOMES) | {"__version__"} == set(llmkit.__all__)
    for name in llmkit.__all__:
        assert getattr(llmkit, name) is not None
        assert name in dir(llmkit)
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = llmkit.nothing_such


def test_importing_is_light_and_quick():
    """Under 0.15 s, and nothing heavy; the quickest of five, for the machine may be busy."""
    program = (
        "import sys, time; start = time.perf_counter(); import llmkit; print(time.perf_counter() - start);"
        "print(*(name for name in ('torch', 'pydantic', 'transformers', 'numpy', 'rich') if name in sys.modules))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.splitlines()
        for _ in range(5)
    ]
    assert runs[0][1] == ""
    assert min(float(run[0]) for run in runs) < 0.15


def test_parameters_and_errors_need_no_torch():
    program = (
        "import sys; from llmkit import SamplingParams, RequestOutput, InvalidRequestError, Registry, EngineConfig;"
        "SamplingParams(n=2); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
