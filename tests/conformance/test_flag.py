"""`pytest --llmkit-conformance`: what is collected, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest


def collect(*arguments, cwd):
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def test_without_the_flag_nothing_heavy_is_imported():
    code = "import sys, llmkit.testing.pytest_plugin; print([m for m in sys.modules if m in ('torch', 'pydantic')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--llmkit-conformance", "scheduler:no-such"], "There is no scheduler plugin 'no-such'"),
        (["--llmkit-conformance", "policy:fcfs"], "'policy:fcfs' is not of the form KIND:NAME"),
        (["--llmkit-conformance", "scheduler:auto"], "names no plugin"),
        (["--llmkit-conformance", "scheduler:fcfs", "--llmkit-option", "x=1"], "takes no options"),
    ],
)
def test_a_usage_error_says_what_is_wrong(arguments, message, tmp_path):
    done = collect(*arguments, cwd=tmp_path)
    assert done.returncode == 4
    assert message in done.stderr
    assert "Traceback" not in done.stderr
