"""Histograms, and totals over several engines."""

from __future__ import annotations

import pytest

from llmkit.engine.stats import EngineStats
from llmkit.metrics.engine import EngineHistory, EngineSnapshot, PluginCalls, plugin_calls
from llmkit.metrics.histogram import STEP_TOKENS, Histogram, token_bounds
from llmkit.registry.rows import PluginRow
from llmkit.registry.timings import Timings


def test_a_bound_belongs_to_the_bucket_below_it():
    histogram = Histogram((1, 10))
    for value in (0, 1, 1.5, 10, 10.5, 1000):
        histogram.observe(value)
    counts = histogram.counts()
    assert (counts.counts, counts.count, counts.total) == ((2, 2, 2), 6, 1023)
    assert (counts + counts).counts == (4, 4, 4)
    with pytest.raises(ValueError, match="other bounds"):
        counts + Histogram((1,)).counts()


def test_bounds_of_tokens_end_below_the_limit():
    assert token_bounds(256) == (1, 2, 5, 10, 20, 50, 100, 200)
    assert token_bounds(1) == (1,)


def snapshot(engine_id, steps=0, preemptions=0, tokens=(), calls=None):
    stats = EngineStats(1, 2, 3, steps, 0, preemptions, 0.5, 10, 5, prefix_query_tokens=0, prefix_hit_tokens=0)
    histogram = Histogram(STEP_TOKENS)
    for value in tokens:
        histogram.observe(value)
    return EngineSnapshot(engine_id, stats, histogram.counts(), calls or {})


def test_totals_never_go_down_when_the_engine_is_another_one():
    history = EngineHistory()
    assert history.totals.counters["num_steps"] == 0
    key = ("scheduler", "fcfs", "peek")
    seen = []
    for state in (
        snapshot("a", 5, 1, (8, 8), {key: PluginCalls(2, 0.5)}),
        snapshot("a", 7, 1, (8, 8, 9), {key: PluginCalls(4, 1.0)}),
        snapshot("b", 0),  # just started
        snapshot("b", 9, 4, (1,), {key: PluginCalls(1, 0.25)}),  # more than the other one ever had
        snapshot("c", 1),
    ):
        history.note(state)
        totals = history.totals
        counts = totals.counters
        seen.append((counts["num_steps"], counts["num_preemptions"], totals.step_tokens.count, totals.plugin_calls))
    assert [row[:3] for row in seen] == [(5, 1, 2), (7, 1, 3), (7, 1, 3), (16, 5, 4), (17, 5, 4)]
    assert seen[-1][3] == {key: PluginCalls(5, 1.25)}


def test_calls_of_plugins_are_scaled_up_from_those_that_were_timed():
    timings = Timings()
    call = timings.of(PluginRow("scheduler", "fcfs", "m", "llmkit", "1")).calls
    counted = timings.sampled(PluginRow("scheduler", "fcfs", "m", "llmkit", "1"), "peek", lambda: None, every=2)
    for _ in range(4):
        counted()
    call["peek"].seconds = 3.0
    assert plugin_calls(timings) == {("scheduler", "fcfs", "peek"): PluginCalls(4, 6.0)}
