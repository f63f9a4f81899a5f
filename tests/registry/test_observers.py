"""Extensions: any number of them, and none can disturb the engine."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from llmkit.errors import PluginError
from llmkit.registry import Registry
from llmkit.registry.breaker import Breaker, FaultCount
from llmkit.registry.breakers import Breakers
from llmkit.registry.observers import LOG_EVERY

GROUP = "llmkit.extensions"

WATCHER = """
from llmkit.hookspecs import PluginInfo, hookimpl

info = PluginInfo("watches")
seen = []

@hookimpl
def llmkit_engine_started(config): seen.append(("started", config))

@hookimpl
def llmkit_engine_stopped(): seen.append("stopped")

@hookimpl
def llmkit_step_finished(): seen.append("step")

@hookimpl
def llmkit_kv_event(event): seen.append(event)
"""

BAD = """
from llmkit.hookspecs import PluginInfo, hookimpl

info = PluginInfo("fails")

@hookimpl
def llmkit_step_finished(stats): raise SystemExit(stats)

@hookimpl
def llmkit_request_finished(request): raise ValueError(request)
"""


@pytest.fixture
def registry(site: Any) -> Registry:
    site.add_module("watcher", WATCHER)
    site.add_module("bad_watcher", BAD)
    site.add_distribution("llmkit-watch", {GROUP: {"watch": "watcher", "bad": "bad_watcher"}})
    return Registry.discover()


def test_none_is_active_unless_named(registry: Registry, cpu: Any) -> None:
    """B78: an empty list activates nothing."""
    assert registry.observers([], cpu) == ()
    assert {row.state for row in registry.find("extension")} == {"found"}


def test_observers_are_told(registry: Registry, cpu: Any) -> None:
    import watcher

    (observer,) = registry.observers(["watch"], cpu)
    config: Any = object()
    observer.llmkit_engine_started(config=config)
    observer.llmkit_step_finished(stats=1)  # type: ignore[arg-type]
    observer.llmkit_request_finished(request=2)  # type: ignore[arg-type]
    observer.llmkit_kv_event(event="stored")  # type: ignore[arg-type]
    observer.llmkit_engine_stopped()
    assert watcher.seen == [("started", config), "step", "stored", "stopped"]
    assert observer.implements("llmkit_kv_event")
    assert not observer.implements("llmkit_request_finished")
    assert registry.selections[-1].name == "watch"
    timing = registry.timings.find("extension", "watch")
    assert timing is not None
    assert timing.calls["llmkit_step_finished"].calls == 1


def test_exceptions_are_logged_once_in_a_while(registry: Registry, cpu: Any, caplog: Any) -> None:
    patient = Breakers()
    patient.add(Breaker("extension", "bad", limit=10 * LOG_EVERY))
    good, bad = registry.observers(["watch", "bad"], cpu, patient)
    with caplog.at_level(logging.ERROR):
        for _ in range(LOG_EVERY):
            for observer in (bad, good):
                observer.llmkit_step_finished(stats=3)
        bad.llmkit_request_finished(request=4)
    assert bad.failures == {"llmkit_step_finished": LOG_EVERY, "llmkit_request_finished": 1}
    assert [record.getMessage() for record in caplog.records] == [
        "The extension 'bad' (llmkit-watch 1.0) failed in llmkit_step_finished (1 times so far)",
        "The extension 'bad' (llmkit-watch 1.0) failed in llmkit_request_finished (1 times so far)",
    ]


def test_one_that_keeps_failing_is_told_nothing_for_a_while(registry: Registry, cpu: Any) -> None:
    import watcher

    watcher.seen.clear()
    breakers = registry.breakers()
    good, bad = registry.observers(["watch", "bad"], cpu, breakers)
    for _ in range(50):
        bad.llmkit_step_finished(stats=3)  # type: ignore[arg-type]
        good.llmkit_step_finished(stats=3)  # type: ignore[arg-type]
    assert breakers.counts() == {
        "extension:bad": FaultCount(5, "open", "llmkit_step_finished() raised SystemExit: 3"),
    }
    assert len(watcher.seen) == 50


def test_unknown_extension_is_an_error(registry: Registry, cpu: Any) -> None:
    """B78: a list that names one that is not installed is not passed over in silence."""
    with pytest.raises(PluginError, match=r"no extension plugin 'missing'.*bad, .*watch"):
        registry.observers(["watch", "missing"], cpu)
