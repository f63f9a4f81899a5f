"""The engine's own numbers: what it tells when asked, and their totals over all engines that a frontend has had."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from llmkit.engine.stats import EngineStats
from llmkit.metrics.histogram import STEP_TOKENS, Histogram, HistogramCounts
from llmkit.registry.timings import PluginTiming

COUNTERS = (
    "num_steps",
    "num_failed_steps",
    "num_out_of_memory",
    "num_preemptions",
    "num_swaps",
    "prefix_query_tokens",
    "prefix_hit_tokens",
    "external_query_tokens",
    "external_hit_tokens",
)
"""Fields of EngineStats that only grow while an engine lives."""

PluginFunction = tuple[str, str, str]
"""Kind, name, and function or hook."""


@dataclass(frozen=True, slots=True)
class PluginCalls:
    """Calls of one function of a plugin, and the seconds they took, estimated from those that were timed."""

    calls: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class EngineSnapshot:
    """An engine at one moment; plain data. engine_id: another one for every engine. step_tokens: of each step."""

    engine_id: str
    stats: EngineStats
    step_tokens: HistogramCounts
    plugin_calls: dict[PluginFunction, PluginCalls]


def plugin_calls(timings: Iterable[PluginTiming]) -> dict[PluginFunction, PluginCalls]:
    """The calls in `timings`, by plugin and function. Plugins of one name from two distributions are one."""
    calls: dict[PluginFunction, PluginCalls] = {}
    for plugin in timings:
        for function, timing in plugin.calls.items():
            key = (plugin.kind, plugin.name, function)
            calls[key] = _sum(calls.get(key, PluginCalls()), PluginCalls(timing.calls, timing.total_seconds))
    return calls


@dataclass(frozen=True)
class EngineTotals:
    """Counters of one engine, or of several together."""

    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    step_tokens: HistogramCounts = field(default_factory=lambda: Histogram(STEP_TOKENS).counts())
    plugin_calls: dict[PluginFunction, PluginCalls] = field(default_factory=dict)

    @classmethod
    def of(cls, snapshot: EngineSnapshot) -> EngineTotals:
        counters = {name: getattr(snapshot.stats, name) for name in COUNTERS}
        return cls(counters, snapshot.step_tokens, snapshot.plugin_calls)

    def __add__(self, other: EngineTotals) -> EngineTotals:
        keys = self.plugin_calls.keys() | other.plugin_calls.keys()
        none = PluginCalls()
        return EngineTotals(
            {name: count + other.counters[name] for name, count in self.counters.items()},
            self.step_tokens + other.step_tokens,
            {key: _sum(self.plugin_calls.get(key, none), other.plugin_calls.get(key, none)) for key in keys},
        )


class EngineHistory:
    """Adds up the counters of an engine and of those before it, so that they never go down when it is started again.

    What an engine did between the last snapshot and its end is not counted.
    """

    def __init__(self) -> None:
        self.latest: EngineSnapshot | None = None
        self._before = EngineTotals()

    def note(self, snapshot: EngineSnapshot) -> None:
        """Take in what the engine has told."""
        if self.latest is not None and self.latest.engine_id != snapshot.engine_id:
            self._before = self.totals
        self.latest = snapshot

    @property
    def totals(self) -> EngineTotals:
        """Since the first engine's start."""
        return self._before if self.latest is None else self._before + EngineTotals.of(self.latest)


def _sum(one: PluginCalls, other: PluginCalls) -> PluginCalls:
    return PluginCalls(one.calls + other.calls, one.seconds + other.seconds)
