"""Recording what torch does."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import pytest
import torch

from llmkit.execution.profiling import TorchProfile

RECORD = """
import sys
from pathlib import Path
import torch
from llmkit.execution.profiling import TorchProfile
profile = TorchProfile(torch.device("cpu"))
profile.start(Path(sys.argv[1]))
torch.ones(2) + 1
print(profile.stop())
"""


def test_a_recording_of_the_cpu_says_nothing_of_its_own(tmp_path):
    """In a process of its own: the profiler is told once how much it may write."""
    done = subprocess.run([sys.executable, "-c", RECORD, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    with gzip.open(done.stdout.strip(), "rt") as file:
        assert any(event.get("name") == "aten::add" for event in json.load(file)["traceEvents"])


def test_the_driver_is_not_asked_for_where_the_engine_runs_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asked"))
    profile = TorchProfile(torch.device("cpu"))
    profile.start(tmp_path)
    assert profile.stop().is_file()
