"""What can be asked of a running engine by name, between two steps, from wherever its frontend is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from llmkit.errors import EngineError

if TYPE_CHECKING:
    from llmkit.engine.factory import Engine
    from llmkit.engine.stats import EngineStats, StepSummary
    from llmkit.kv_cache.stats import KVMap
    from llmkit.metrics.engine import EngineSnapshot
    from llmkit.registry import PluginTiming, Selection


def stats(engine: Engine) -> EngineStats:
    """A snapshot of queues, cache and counters."""
    return engine.core.stats()


def reset_prefix_cache(engine: Engine) -> bool:
    """Forget all cached prefixes; False, with nothing forgotten, if running requests prevented it."""
    return engine.core.reset_prefix_cache()


def plugin_timings(engine: Engine) -> tuple[PluginTiming, ...]:
    """What every plugin that was loaded has cost so far."""
    return tuple(engine.prepared.registry.timings)


def kv_map(engine: Engine) -> KVMap:
    """What became of every block of the KV cache."""
    return engine.core.scheduler.manager.map()


def recent_steps(engine: Engine, after: int = -1) -> list[StepSummary]:
    """The last steps, oldest first; of these, those with a number above `after`."""
    return [summary for summary in engine.core.recent_steps if summary.step > after]


def sleep(engine: Engine, level: int = 1) -> None:
    """Take no steps; see `llmkit.engine.sleeping`."""
    engine.core.sleep(level)


def wake_up(engine: Engine, tags: Sequence[str] | None = None) -> None:
    """Go on, or get back the parts that `tags` name."""
    engine.core.sleeper.wake_up(tags)


def is_sleeping(engine: Engine) -> bool:
    """Whether any part of the engine sleeps."""
    return bool(engine.core.sleeper.parts)


def start_profile(engine: Engine, folder: str) -> None:
    """Record what torch does from now on, for a file in `folder`."""
    engine.core.executor.start_profile(folder)


def stop_profile(engine: Engine) -> str:
    """Write the recording; its path."""
    return engine.core.executor.stop_profile()


def snapshot(engine: Engine) -> EngineSnapshot:
    """`stats` and what else metrics are made of."""
    from llmkit.metrics.engine import EngineSnapshot, plugin_calls

    core = engine.core
    calls = plugin_calls(engine.prepared.registry.timings)
    return EngineSnapshot(core.engine_id, core.stats(), core.step_tokens.counts(), calls)


def selections(engine: Engine) -> tuple[Selection, ...]:
    """The plugins that were chosen, and why."""
    return tuple(engine.prepared.registry.selections)


UTILITIES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        function.__name__: function
        for function in (
            stats,
            reset_prefix_cache,
            plugin_timings,
            snapshot,
            selections,
            kv_map,
            recent_steps,
            sleep,
            wake_up,
            is_sleeping,
            start_profile,
            stop_profile,
        )
    }
)
"""Name → function of the engine and the call's arguments. Its result and what it raises go back to the caller, so
they must be plain data where the engine is in another process."""


UNBOUNDED = frozenset({"sleep", "wake_up", "stop_profile"})
"""Utilities that may take any time, as loading a model may: they move weights or write long files."""


def run_utility(engine: Engine, method: str, arguments: Sequence[Any] = ()) -> Any:
    """Call a utility by its name. Raises EngineError if there is none, else what it raises."""
    function = UTILITIES.get(method)
    if function is None:
        raise EngineError(f"the engine has no utility {method!r}; it has {', '.join(UTILITIES)}.")
    return function(engine, *arguments)
