"""How long plugins take: to import, to build their object, and in the calls that someone chose to time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import ParamSpec, TypeVar

from llmkit.registry.rows import PluginRow

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class CallTiming:
    """Calls of one function. Every call is counted; `seconds` is the time of the `timed` ones among them."""

    calls: int = 0
    timed: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """One more call, timed."""
        self.calls += 1
        self.timed += 1
        self.seconds += seconds

    @property
    def total_seconds(self) -> float:
        """Time of all calls, estimated from the timed ones."""
        return self.seconds * self.calls / self.timed if self.timed else 0.0


@dataclass
class PluginTiming:
    """Times of one plugin, in seconds; None where it has not happened. `calls`: by name of the function."""

    kind: str
    name: str
    distribution: str
    import_seconds: float | None = None
    create_seconds: float | None = None
    calls: dict[str, CallTiming] = field(default_factory=dict)

    def describe(self) -> str:
        """For people: "import 1.9 ms, create 0.1 ms, peek 120 calls 0.2 ms"."""
        steps = (("import", self.import_seconds), ("create", self.create_seconds))
        parts = [f"{what} {1e3 * seconds:.1f} ms" for what, seconds in steps if seconds is not None]
        parts += [f"{name} {c.calls} calls {1e3 * c.total_seconds:.1f} ms" for name, c in self.calls.items()]
        return ", ".join(parts)


@dataclass
class Timings:
    """Times of all plugins that have been loaded; iterates over PluginTiming."""

    _plugins: dict[tuple[str, str, str, str], PluginTiming] = field(default_factory=dict)

    def __iter__(self) -> Iterator[PluginTiming]:
        return iter(self._plugins.values())

    def of(self, row: PluginRow) -> PluginTiming:
        """The times of a plugin, to read and to add to."""
        return self._plugins.setdefault(row.identity, PluginTiming(row.kind, row.name, row.distribution))

    def find(self, kind: str, name: str, distribution: str | None = None) -> PluginTiming | None:
        """The times of a plugin by name (of one distribution, if several offer it); None if it was never loaded."""
        wanted = (kind, name)
        return next((t for t in self if (t.kind, t.name) == wanted and distribution in (None, t.distribution)), None)

    def sampled(self, row: PluginRow, call: str, function: Callable[P, R], every: int = 16) -> Callable[P, R]:
        """`function`, counting its calls and timing each `every`-th, under the name `call`.

        Costs about a tenth of a microsecond a call; not for functions that are called per token.
        """
        return sampled(self.of(row).calls.setdefault(call, CallTiming()), function, every)


def sampled(timing: CallTiming, function: Callable[P, R], every: int = 16) -> Callable[P, R]:
    """`function`, counted in `timing`, each `every`-th call timed, also when it raises."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        timing.calls += 1
        if timing.calls % every:
            return function(*args, **kwargs)
        start = perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            timing.seconds += perf_counter() - start
            timing.timed += 1

    return call
