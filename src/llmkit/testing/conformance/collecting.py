"""The pytest side of the conformance kit: which suites are collected, for which plugins."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import cached_property
from pathlib import Path

import pytest

from llmkit.errors import LlmkitError
from llmkit.testing.conformance import COMMON_SUITE, suites_of
from llmkit.testing.conformance.child import ChildReport, reports
from llmkit.testing.conformance.naming import parse_targets
from llmkit.testing.conformance.patience import RanOutOfTime, at_most
from llmkit.testing.conformance.target import Conformance

FOLDER = Path(__file__).parent
PACKAGE = __name__.rpartition(".")[0]
NAME = "llmkit-conformance"


def start(config: pytest.Config) -> None:
    """Register `Collecting` if this run is to try plugins: those of the command line always, those of the settings in
    a run of all tests of their package.

    Raises pytest.UsageError for a plugin that does not exist or cannot be loaded, options that it does not take, and
    a plugin of the command line that cannot be used here.
    """
    by_flag, by_settings = config.getoption("llmkit_conformance"), config.getini("llmkit_conformance")
    specs = [*by_flag, *(by_settings if not by_flag and _runs_all_tests(config) else ())]
    if not specs:
        return
    options, settings = config.getoption("llmkit_option"), config.getini("llmkit_options")
    try:
        targets = parse_targets(specs, options, config.getoption("llmkit_device"), settings)
        for target in targets if by_flag else ():
            if target.problems:
                hint = target.plugin.install_hint() or "Try it on a machine that has what it needs."
                raise target.plugin.row.error("; ".join(target.problems), hint)
    except LlmkitError as error:
        raise pytest.UsageError(f"llmkit conformance: {error}") from None
    suites = dict.fromkeys(name for target in targets for name in suites_of(target.kind))
    paths = [str(FOLDER / f"{name}.py") for name in suites]
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    config.args = list(dict.fromkeys([*(config.args if named or not by_flag else ()), *paths]))
    config.pluginmanager.register(Collecting(targets, config.getoption("llmkit_timeout")), NAME)


def _runs_all_tests(config: pytest.Config) -> bool:
    """Whether nothing narrower was asked for than the package's folder, or one of its `testpaths`."""
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        return True
    whole = {config.rootpath, *(config.rootpath / path for path in config.getini("testpaths"))}
    return any((config.invocation_params.dir / argument).resolve() in whole for argument in config.args)


class Collecting:
    """A pytest plugin for one run in which plugins are on trial. timeout_s: the most that a check may take, 0 for no
    limit; of a plugin that has needed longer no more is asked."""

    def __init__(self, targets: Sequence[Conformance], timeout_s: float) -> None:
        self.targets = targets
        self._timeout_s = timeout_s
        self._stuck: dict[str, str] = {}  # plugin → the check that did not end

    def child_report(self, target: Conformance) -> ChildReport:
        """What has become of the plugin in a fresh process; all plugins on trial share one."""
        return self._child_reports[_id(target)]

    @cached_property
    def _child_reports(self) -> dict[str, ChildReport]:
        return dict(zip(map(_id, self.targets), reports(self.targets), strict=True))

    def pytest_report_header(self) -> list[str]:
        return [f"llmkit conformance: {', '.join(map(_described, self.targets))}"]

    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
        """Suites lie far from the tests that run; they are shown under a short name."""
        if module_path.parent != FOLDER:
            return None
        module: pytest.Module = pytest.Module.from_parent(parent, path=module_path, nodeid=f"llmkit/{module_path.stem}")
        return module

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        package, _, suite = metafunc.module.__name__.rpartition(".")
        if "conformance" in metafunc.fixturenames and package == PACKAGE:
            targets = [_parameter(t, suite) for t in self.targets if suite in suites_of(t.kind)]
            metafunc.parametrize("conformance", targets, indirect=True, scope="session")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        return (yield from self._limited(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        if (target := _tried_by(item)) and (check := self._stuck.get(_id(target))):
            pytest.skip(f"{check} did not end")
        return (yield from self._limited(item))

    def _limited(self, item: pytest.Item) -> Generator[None, None, None]:
        target = _tried_by(item)
        if target is None:
            return (yield)
        try:
            with at_most(self._timeout_s):
                return (yield)
        except RanOutOfTime:
            self._stuck[_id(target)] = item.name
            raise

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if terminalreporter.verbosity > -2:
            for target in self.targets:
                terminalreporter.write_line(f"{_id(target)} ({target.plugin.row.origin}): {target.timing.describe()}")


def _parameter(target: Conformance, suite: str) -> object:
    """A plugin that cannot work here is asked no more than what every machine asks it."""
    reason = "; ".join(target.problems)
    marks = [pytest.mark.skip(reason=reason)] if reason and suite != COMMON_SUITE else []
    return pytest.param(target, id=_id(target), marks=marks)


def _tried_by(item: pytest.Item) -> Conformance | None:
    """The plugin that a check of the suites tries; None for other tests."""
    callspec = getattr(item, "callspec", None)
    target = callspec.params.get("conformance") if callspec and item.path.parent == FOLDER else None
    return target if isinstance(target, Conformance) else None


def _id(target: Conformance) -> str:
    return f"{target.kind}:{target.choice}"


def _described(target: Conformance) -> str:
    given = " ".join(f"{key}={value!r}" for key, value in target.given.items())
    return f"{_id(target)} on {target.device}" + (f" with {given}" if given else "")
