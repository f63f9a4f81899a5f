"""Extensions at run time: told what happens, unable to disturb it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmkit.errors import described
from llmkit.registry.breaker import Breaker
from llmkit.registry.loading import LoadedPlugin
from llmkit.registry.timings import Timings

if TYPE_CHECKING:
    from llmkit.config import EngineConfig
    from llmkit.engine.stats import StepStats
    from llmkit.kv_cache.events import KVEvent
    from llmkit.requests.output import FinishedRequest

logger = logging.getLogger(__name__)

# A broken observer of steps would otherwise fill the log; its first failure is shown in full.
LOG_EVERY = 1000


class Observer:
    """One extension, with a method for each hook. The plugin's functions are called directly, without pluggy, and what
    they raise is logged.

    A method whose hook the plugin does not implement does nothing; none does anything while `breaker`, which counts
    what the plugin raises, is open.
    """

    def __init__(self, plugin: LoadedPlugin, timings: Timings, breaker: Breaker | None = None) -> None:
        self.name = plugin.row.name
        self.breaker = breaker or Breaker("extension", self.name)
        self.failures: dict[str, int] = {}
        self._origin = plugin.row.origin
        self._functions: dict[str, Callable[[Any], Any]] = {}
        for hook in plugin.kind.hooks:
            if not hasattr(self, hook.__name__):
                continue  # not of the engine: the routes of the server
            for implementation in getattr(plugin.manager.hook, hook.__name__).get_hookimpls():
                function = implementation.function
                # pluggy lets an implementation leave out arguments; these hooks have one at most.
                adapted = function if implementation.argnames else _without_argument(function)
                self._functions[hook.__name__] = timings.sampled(plugin.row, hook.__name__, adapted, every=1)

    def implements(self, hook: str) -> bool:
        """Whether the plugin wants to be told: what costs something to tell is then not even prepared."""
        return hook in self._functions

    def llmkit_engine_started(self, config: EngineConfig) -> None:
        """The engine is ready for requests."""
        self._call("llmkit_engine_started", config)

    def llmkit_engine_stopped(self) -> None:
        """The engine has been closed."""
        self._call("llmkit_engine_stopped", None)

    def llmkit_step_finished(self, stats: StepStats) -> None:
        """A step has been executed and its results applied."""
        self._call("llmkit_step_finished", stats)

    def llmkit_kv_event(self, event: KVEvent) -> None:
        """The content of the prefix cache has changed."""
        self._call("llmkit_kv_event", event)

    def llmkit_request_finished(self, request: FinishedRequest) -> None:
        """A request has ended."""
        self._call("llmkit_request_finished", request)

    def _call(self, hook: str, argument: object) -> None:
        function = self._functions.get(hook)
        if function is None or self.breaker.open:
            return
        try:
            function(argument)
        except (Exception, SystemExit) as error:
            self.breaker.record(f"{hook}() raised {described(error)}")
            count = self.failures[hook] = self.failures.get(hook, 0) + 1
            if count % LOG_EVERY == 1:
                logger.error(
                    "The extension %r (%s) failed in %s (%d times so far)",
                    self.name,
                    self._origin,
                    hook,
                    count,
                    exc_info=error,
                )


def _without_argument(function: Callable[[], Any]) -> Callable[[Any], Any]:
    return lambda _argument: function()
