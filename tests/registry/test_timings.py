"""Sampled timing of calls."""

from __future__ import annotations

import pytest

from llmkit.registry import Timings
from llmkit.registry.rows import PluginRow
from llmkit.registry.timings import CallTiming, sampled


def test_every_call_is_counted_and_some_are_timed() -> None:
    timing = CallTiming()
    add = sampled(timing, lambda a, b: a + b, every=4)
    assert [add(i, b=1) for i in range(10)] == list(range(1, 11))
    assert (timing.calls, timing.timed) == (10, 2)
    assert timing.total_seconds == pytest.approx(timing.seconds * 5)


def test_failing_calls_count_too() -> None:
    timing = CallTiming()
    with pytest.raises(ZeroDivisionError):
        sampled(timing, lambda: 1 // 0, every=1)()
    assert (timing.calls, timing.timed) == (1, 1)
    assert CallTiming().total_seconds == 0.0


def test_timings_by_plugin() -> None:
    timings = Timings()
    row = PluginRow("scheduler", "x", "x", "llmkit-x", "1")
    assert timings.sampled(row, "victim", lambda: 5, every=2)() == 5
    assert timings.of(row).calls["victim"].calls == 1
    assert [timing.name for timing in timings] == ["x"]
    assert timings.find("scheduler", "x", "llmkit-x") is timings.of(row)
    assert timings.find("scheduler", "x", "another") is None
    timings.of(row).import_seconds = 0.002
    timings.of(row).calls["peek"] = CallTiming()
    timings.of(row).calls["peek"].add(0.001)
    assert timings.of(row).describe().startswith("import 2.0 ms, victim 1 calls")
    assert timings.of(row).describe().endswith("peek 1 calls 1.0 ms")
