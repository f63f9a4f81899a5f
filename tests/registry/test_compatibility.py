"""Requirements on llmkit are checked before import, requirements of a plugin before it is used."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from llmkit.errors import PluginError
from llmkit.registry import Registry
from llmkit.registry.compatibility import incompatibility, install_hint, missing_requirements

GROUP = "llmkit.schedulers"


def test_package_for_another_llmkit_is_not_imported(site: Any, cpu: Any) -> None:
    site.add_policy("future")
    site.add_distribution("llmkit-future", {GROUP: {"future": "future"}}, requires=["llmkit>=99"])
    registry = Registry.discover()
    (row,) = [row for row in registry.find("scheduler") if row.name == "future"]
    assert row.state == "incompatible"
    for _ in range(2):
        with pytest.raises(PluginError, match=r"it requires llmkit>=99, this is llmkit .*--upgrade llmkit-future"):
            registry.create("scheduler", "future", cpu)
    assert registry.resolve("scheduler", "future").state == "incompatible"
    assert "future" not in sys.modules


@pytest.mark.parametrize(
    ("lines", "fits"),
    [
        ([], True),
        (["llmkit"], True),
        (["llmkit>=0.0.1"], True),
        (["LLMKIT >=0.0.1,<99"], True),
        (["llmkit>=99; extra == 'new'"], True),
        (["llmkit>=99; python_version < '3'"], True),
        (["llmkit-tools>=99", "torch>=99"], True),
        (["numpy", "llmkit<0.0.1"], False),
        (["llmkit[flashinfer]>=99"], False),
        (["llmkit ~~ 1"], False),
    ],
)
def test_requirement_on_llmkit(lines: list[str], fits: bool) -> None:
    assert (incompatibility(lines) is None) is fits


def test_missing_requirements() -> None:
    assert missing_requirements(["pluggy>=1", "pytest", "no-such-library; python_version < '3'"]) == []
    problems = missing_requirements(["no-such-library>=2", "pluggy>=999", "not a requirement!"])
    assert problems[0] == "it needs no-such-library>=2, which is not installed"
    assert problems[1].startswith("it needs pluggy>=999, but pluggy ")
    assert "cannot be read" in problems[2]


def test_missing_requirement_comes_with_the_command_that_installs_it(site: Any, cpu: Any) -> None:
    site.add_policy("needy", "summary='x', requires=('no-such-library>=2',), extra='fast'")
    site.add_distribution("llmkit-needy", {GROUP: {"needy": "needy"}})
    with pytest.raises(PluginError, match="no-such-library>=2, which is not installed") as caught:
        Registry.discover().create("scheduler", "needy", cpu)
    assert caught.value.hint == "Install it with: pip install 'no-such-library>=2' (the extra llmkit-needy[fast])."


def test_install_hints() -> None:
    assert install_hint(("a>=1", "b"), None, "llmkit-x") == "Install it with: pip install 'a>=1' 'b'."
    assert install_hint(("a",), "llmkit[a]", "llmkit") == "Install it with: pip install 'a' (the extra llmkit[a])."


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ("return ['it needs a GPU of compute capability 9.0']", "it needs a GPU of compute capability 9.0"),
        ("raise RuntimeError('oops')", "its llmkit_problems failed: RuntimeError: oops"),
        ("raise SystemExit", "its llmkit_problems failed: SystemExit"),
    ],
)
def test_problems_of_the_machine_are_fatal_for_a_chosen_plugin(site: Any, cpu: Any, body: str, pattern: str) -> None:
    site.add_policy("picky", body=f"@hookimpl\ndef llmkit_problems(environment):\n    {body}\n")
    site.add_distribution("llmkit-picky", {GROUP: {"picky": "picky"}})
    with pytest.raises(PluginError, match=pattern):
        Registry.discover().create("scheduler", "picky", cpu)
