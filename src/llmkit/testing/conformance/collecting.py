"""The pytest side of the conformance kit: which suites are collected, and the fixtures they take."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import pytest

from llmkit.errors import LlmkitError
from llmkit.testing.conformance import suites_of
from llmkit.testing.conformance.child import ChildReport, reports
from llmkit.testing.conformance.target import Conformance, parse_targets

FOLDER = Path(__file__).parent
PACKAGE = __name__.rpartition(".")[0]


class Collecting:
    """A pytest plugin for one run in which plugins are on trial.

    Plugins named on the command line are all that is run, unless paths are named too. Plugins named in the settings
    run with the tests of their package, except where single files are asked for.
    Raises pytest.UsageError for a plugin that does not exist, does not work here, or options that it does not take.
    """

    def __init__(self, config: pytest.Config) -> None:
        by_flag = config.getoption("llmkit_conformance")
        specs = [*by_flag, *config.getini("llmkit_conformance")]
        options = [*config.getini("llmkit_options"), *config.getoption("llmkit_option")]
        try:
            self.targets = parse_targets(specs, options, config.getoption("llmkit_device"))
        except LlmkitError as error:
            raise pytest.UsageError(f"llmkit conformance: {error}") from None
        paths = [str(FOLDER / f"{name}.py") for name in self._suites()]
        config.args = _with_suites(config, paths, bool(by_flag))

    def _suites(self) -> list[str]:
        return list(dict.fromkeys(name for target in self.targets for name in suites_of(target.kind)))

    @cached_property
    def _child_reports(self) -> dict[str, ChildReport]:
        return dict(zip(map(_id, self.targets), reports(self.targets), strict=True))

    def pytest_report_header(self) -> list[str]:
        return [f"llmkit conformance: {', '.join(map(_described, self.targets))}"]

    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
        if module_path.parent != FOLDER:
            return None
        module: pytest.Module = pytest.Module.from_parent(parent, path=module_path, nodeid=f"llmkit/{module_path.stem}")
        return module

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        package, _, suite = metafunc.module.__name__.rpartition(".")
        if "conformance" in metafunc.fixturenames and package == PACKAGE:
            targets = [target for target in self.targets if suite in suites_of(target.kind)]
            metafunc.parametrize("conformance", targets, ids=map(_id, targets), indirect=True, scope="session")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for target in self.targets:
            terminalreporter.write_line(f"{_id(target)} ({target.plugin.row.origin}): {target.timing.describe()}")

    def child_report(self, target: Conformance) -> ChildReport:
        """What has become of the plugin in a fresh process; all plugins on trial share one."""
        return self._child_reports[_id(target)]


def _id(target: Conformance) -> str:
    return f"{target.kind}:{target.choice}"


def _described(target: Conformance) -> str:
    given = " ".join(f"{key}={value!r}" for key, value in target.given.items())
    return f"{_id(target)} on {target.device}" + (f" with {given}" if given else "")


def _with_suites(config: pytest.Config, suites: Sequence[str], by_flag: bool) -> list[str]:
    """What pytest is to collect: the suites, and what else was meant."""
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    if by_flag and not named:
        return list(suites)
    single_files = named and not any(Path(argument).is_dir() for argument in config.args)
    if single_files and not by_flag:
        return list(config.args)
    return list(dict.fromkeys([*config.args, *suites]))
