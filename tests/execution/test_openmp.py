"""Threads that wait for each other must leave the processor to others."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import pytest

from llmkit.openmp import SPIN_COUNT, wait_briefly


@pytest.fixture(autouse=True)
def _as_if_nothing_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that what the test sets is undone
        monkeypatch.delenv(name)


def test_spinning_is_limited() -> None:
    wait_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == str(SPIN_COUNT)


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "chosen")
    before = dict(os.environ)
    wait_briefly()
    assert dict(os.environ) == before


def test_later_it_would_do_nothing_but_confuse_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    wait_briefly()
    assert "GOMP_SPINCOUNT" not in os.environ


def test_an_engine_is_prepared_with_it() -> None:
    program = """
import os, sys
from llmkit.config import load_config
from llmkit.engine.factory import prepare_model
from llmkit.errors import ModelError
try:
    prepare_model(load_config(flags={"model.model": "no such model"}).config)
except ModelError:
    print("torch" in sys.modules, os.environ.get("GOMP_SPINCOUNT"))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == f"True {SPIN_COUNT}\n"
