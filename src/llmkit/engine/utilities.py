"""What can be asked of a running engine by name, between two steps, from wherever its frontend is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from llmkit.errors import EngineError

if TYPE_CHECKING:
    from llmkit.engine.factory import Engine
    from llmkit.engine.stats import EngineStats
    from llmkit.registry import PluginTiming


def stats(engine: Engine) -> EngineStats:
    """A snapshot of queues, cache and counters."""
    return engine.core.stats()


def reset_prefix_cache(engine: Engine) -> bool:
    """Forget all cached prefixes; False, with nothing forgotten, if running requests prevented it."""
    return engine.core.reset_prefix_cache()


def plugin_timings(engine: Engine) -> tuple[PluginTiming, ...]:
    """What every plugin that was loaded has cost so far."""
    return tuple(engine.prepared.registry.timings)


UTILITIES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {function.__name__: function for function in (stats, reset_prefix_cache, plugin_timings)}
)
"""Name → function of the engine and the call's arguments. Its result and what it raises go back to the caller, so
they must be plain data where the engine is in another process."""


def run_utility(engine: Engine, method: str, arguments: Sequence[Any] = ()) -> Any:
    """Call a utility by its name. Raises EngineError if there is none, else what it raises."""
    function = UTILITIES.get(method)
    if function is None:
        raise EngineError(f"the engine has no utility {method!r}; it has {', '.join(UTILITIES)}.")
    return function(engine, *arguments)
