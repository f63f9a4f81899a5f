"""The engine as its process serves it, and what the parent is told about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmkit.config import EngineConfig
    from llmkit.engine.factory import Engine
    from llmkit.execution.setup import LoadProgress, WorkerReport
    from llmkit.kv_cache.layout import KVCacheLayout
    from llmkit.registry import Registry, Selection
    from llmkit.scheduling.limits import Limits


@dataclass(frozen=True)
class EngineInfo:
    """What an engine in another process is made of: the resolved configuration, the worker's report with the memory
    plan, the cache's layout, the plugins chosen, and the scheduler's limits. pid: of its process."""

    config: EngineConfig
    report: WorkerReport
    layout: KVCacheLayout
    selections: tuple[Selection, ...]
    limits: Limits
    pid: int


class ServedEngine:
    """An Engine with the few things that the engine process needs besides the core."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.core = engine.core

    def info(self) -> EngineInfo:
        import os

        engine = self._engine
        selections = tuple(engine.prepared.registry.selections)
        limits = engine.core.scheduler.limits
        return EngineInfo(engine.config, engine.report, engine.layout, selections, limits, os.getpid())

    def run_utility(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """As `llmkit.engine.utilities.run_utility`."""
        from llmkit.engine.utilities import run_utility

        return run_utility(self._engine, method, arguments)

    def close(self) -> None:
        self._engine.close()


class EngineBuilder:
    """Builds the engine of `config` in the engine process. Pickles; the registry goes as its manifest, and is found
    again over there: PluginError if it is not the same."""

    def __init__(self, config: EngineConfig, registry: Registry) -> None:
        self._config = config
        self._registry = registry

    def __call__(self, progress: LoadProgress) -> ServedEngine:
        """Raises ConfigError, PluginError, ModelError, OutOfMemoryError."""
        from llmkit.engine.factory import build_engine

        return ServedEngine(build_engine(self._config, self._registry, progress))
