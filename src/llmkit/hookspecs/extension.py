"""Kind `extension`: observers of the engine; any number may be active. An exception in one is logged, and never
reaches the engine. The hook for the server's routes is called in the server's process, all others in the engine's; each
process loads the plugin for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmkit.hookspecs.markers import hookspec

if TYPE_CHECKING:
    from fastapi import FastAPI

    from llmkit.config import EngineConfig
    from llmkit.engine.stats import StepStats
    from llmkit.kv_cache.events import KVEvent
    from llmkit.requests.output import FinishedRequest


@hookspec
def llmkit_engine_started(config: EngineConfig) -> None:
    """The engine is ready for requests.

    .. versionadded:: 0.1
    """


@hookspec
def llmkit_engine_stopped() -> None:
    """The engine has been closed.

    .. versionadded:: 0.1
    """


@hookspec
def llmkit_step_finished(stats: StepStats) -> None:
    """A step has been executed and its results applied. Called in the step loop: must be quick.

    .. versionadded:: 0.1
    """


@hookspec
def llmkit_kv_event(event: KVEvent) -> None:
    """The content of the prefix cache has changed: blocks can be found (`BlockStored`), are gone (`BlockRemoved`), or
    all are gone (`AllBlocksCleared`). Called in the step loop, often: must be quick. Events are made only if an active
    extension implements this hook.

    .. versionadded:: 0.1
    """


@hookspec
def llmkit_request_finished(request: FinishedRequest) -> None:
    """A request has ended, for whatever reason.

    .. versionadded:: 0.1
    """


@hookspec
def llmkit_server_routes(app: FastAPI, server: Any) -> None:
    """Add routes to the HTTP server, before it starts. `server` is its ServerContext: the AsyncLLM (`server.llm`), the
    settings, and what else the server's own routes go by. What this hook raises ends the start. Paths under /v1, /v2
    and /inference need an API key if there are keys; others are open.

    .. versionadded:: 0.1
    """
