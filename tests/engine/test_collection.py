"""The garbage collector while an engine starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECKS = Path(__file__).with_name("collection_checks.py")


def test_the_collector_rests_while_an_engine_starts_and_only_then() -> None:
    """In a process of its own: what is frozen concerns all of a process, and in a run of all tests that is a million
    objects, which other tests have frozen or would have to walk over."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(CHECKS)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " passed" in ended.stdout
    assert "failed" not in ended.stdout
