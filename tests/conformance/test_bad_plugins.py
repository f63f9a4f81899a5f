"""A check that cannot fail is no check: plugins with one thing wrong each, and the check that must notice it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# plugin → the checks that must fail for it; "kind": at least one of its kind's suite
BAD = {
    "kernels:bad_plugins:TwoLines": {"test_the_summary_is_one_line"},
    "kernels:bad_plugins:ProblemsAreText": {"test_problems_are_sentences"},
    "kernels:bad_plugins:ProblemsFailElsewhere": {"test_problems_are_sentences"},
    "kernels:bad_plugins:Sleepy": {"test_problems_are_told_at_once"},
    "kernels:bad_plugins:LeavesAThread": {"test_it_leaves_no_thread"},
    "kernels:bad_plugins:Lax": {"test_an_unknown_option_is_refused"},
    "kernels:bad_plugins:Silent": {"test_every_option_is_described"},
    "kernels:bad_plugins:WrongDefault": {"test_defaults_are_valid", "test_options_can_be_written_to_a_file"},
    "kernels:bad_plugins:OneWay": {"test_options_can_be_written_to_a_file"},
    "kernels:bad_plugins:Shared": {"test_it_is_built_anew_each_time"},
    "kernels:bad_plugins:FailsInAChild": {"test_it_is_built_in_another_process"},
    "kernels:bad_plugins:TouchesCuda": {"test_no_import_touches_cuda"},
    "scheduler:bad_plugins:Starving": {"kind"},
    "attention:bad_plugins:OffScale": {"kind"},
    "attention:bad_plugins:OneTooFar": {"kind"},
    "attention:bad_plugins:Untidy": {"kind"},
    "attention:bad_plugins:Clearing": {"kind"},
    "attention:bad_plugins:Crowded": {"kind"},
    "attention:bad_plugins:Leaky": {"kind"},
    "attention:bad_plugins:Short": {"kind"},
    "attention:bad_plugins:Mute": {"kind"},
    "attention:bad_plugins:Rigid": {"kind"},
    "structured:bad_plugins:Lenient": {"kind"},
    "structured:bad_plugins:Forgetful": {"kind"},
    "connector:bad_plugins:Talkative": {"kind"},
    "model:bad_plugins:Careless": {"kind"},
    # last, as another process is needed after each
    "kernels:bad_heavy:Heavy": {"test_the_front_door_imports_nothing_heavy"},
    "kernels:bad_plugins:EndsTheChild": {"test_it_loads_in_another_process", "test_it_is_built_in_another_process"},
}
REFUSED = {"kernels:bad_plugins:BadRequirement": "cannot be read"}


def run_kit(*arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=line", "-p", "no:cacheprovider", *arguments]
    variables = {**os.environ, "PYTHONPATH": str(HERE), "PYTHONWARNINGS": "ignore"}
    return subprocess.run(command, cwd=HERE.parents[1], env=variables, capture_output=True, text=True)


@pytest.fixture(scope="module")
def failures():
    """Plugin → names of the checks that have failed, with what they said; one process for all."""
    done = run_kit(*(f"--llmkit-conformance={plugin}" for plugin in BAD))
    assert done.returncode == 1, done.stdout + done.stderr
    found = {plugin: {} for plugin in BAD}
    pattern = r"^(?:FAILED|ERROR) llmkit/(\w+)::(\w+)\[([^\]]+)\](.*)"
    for suite, check, plugin, reason in re.findall(pattern, done.stdout, re.MULTILINE):
        owner = next(name for name in BAD if plugin.startswith(name))
        found[owner][check if suite == "common_suite" else "kind"] = reason
    return found


@pytest.mark.long
@pytest.mark.parametrize("plugin", BAD)
def test_it_is_noticed_and_nothing_else_is_blamed(plugin, failures):
    assert failures[plugin].keys() == BAD[plugin], failures[plugin]


@pytest.mark.parametrize("plugin", REFUSED)
def test_what_cannot_be_used_at_all_is_refused(plugin):
    done = run_kit(f"--llmkit-conformance={plugin}")
    assert done.returncode == 4
    assert REFUSED[plugin] in done.stderr


def test_one_that_never_answers_is_told_so_once():
    plugin = "--llmkit-conformance=scheduler:bad_plugins:Stuck"
    done = run_kit(plugin, "--llmkit-timeout=3", "-k", "attributes or empty or every_request")
    assert done.returncode == 1
    assert "1 failed, 2 skipped, 1 passed" in done.stdout or "1 failed, 1 passed, 2 skipped" in done.stdout
    assert re.search(r"not ended after 3 seconds \(--llmkit-timeout\)\. It was in [\w.]*wait ", done.stdout)
