"""pytest plugin of llmkit, found by pytest once llmkit is installed: fixtures for tests of plugins, and
`--llmkit-conformance KIND:NAME`, which runs the conformance suites on a plugin.

It is imported by every pytest run of the environment: nothing of llmkit is imported before it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from llmkit.registry import Registry
    from llmkit.testing.conformance.child import ChildReport
    from llmkit.testing.conformance.target import Conformance


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("llmkit", "conformance of llmkit plugins")
    group.addoption(
        "--llmkit-conformance",
        action="append",
        default=[],
        metavar="KIND:NAME",
        help="run the conformance suites of llmkit on this plugin, and other tests only if paths are given; repeatable",
    )
    group.addoption(
        "--llmkit-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the plugin on trial; KIND.NAME.KEY=VALUE if there are several; repeatable",
    )
    group.addoption(
        "--llmkit-device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="device on which plugins are tried; auto: a GPU if there is one and the plugin can use it",
    )
    group.addoption(
        "--llmkit-timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="the most that a check of the conformance suites may take, 0 for no limit (default: 120)",
    )
    parser.addini(
        "llmkit_conformance",
        "plugins (KIND:NAME, or distribution:NAME for all of one) whose conformance is part of the tests",
        "linelist",
        [],
    )
    parser.addini(
        "llmkit_options", "options (KIND.NAME.KEY=VALUE) of the plugins in llmkit_conformance", "linelist", []
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("llmkit_conformance") or config.getini("llmkit_conformance"):
        from llmkit.testing.conformance.collecting import start

        start(config)


@pytest.fixture
def llmkit_registry() -> Registry:
    """A fresh registry of everything installed; `register` adds a plugin under test without an entry point."""
    from llmkit.registry import Registry

    return Registry.discover()


@pytest.fixture(scope="session")
def conformance(request: pytest.FixtureRequest) -> Conformance:
    """The plugin on trial; for the suites that `--llmkit-conformance` collects."""
    if not hasattr(request, "param"):
        pytest.fail("the fixture `conformance` is for the suites that --llmkit-conformance collects")
    target: Conformance = request.param
    return target


@pytest.fixture(scope="session")
def conformance_child(request: pytest.FixtureRequest, conformance: Conformance) -> ChildReport:
    """What has become of the plugin on trial in a fresh process."""
    collecting = request.config.pluginmanager.get_plugin("llmkit-conformance")
    assert collecting is not None
    report: ChildReport = collecting.child_report(conformance)
    return report
