"""Builds a connector's halves where they are needed: one beside the scheduler, one in each worker."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from llmkit.errors import ConfigError, LlmkitError, PluginError, described
from llmkit.hookspecs.connector import Connector, SchedulerConnector, SchedulerContext, WorkerConnector, WorkerContext
from llmkit.registry import detect_environment

if TYPE_CHECKING:
    import torch

    from llmkit.config import EngineConfig
    from llmkit.engine.factory import PreparedModel
    from llmkit.execution.setup import WorkerReport, WorkerSetup
    from llmkit.execution.worker_transfers import WorkerTransfers
    from llmkit.hookspecs.connector import ConnectorBuilder
    from llmkit.hookspecs.plugin import Environment
    from llmkit.kv_cache.layout import KVCacheLayout
    from llmkit.registry import Registry
    from llmkit.registry.breaker import Breaker
    from llmkit.registry.breakers import Breakers
    from llmkit.scheduling.guarded_connector import GuardedConnector

HalfT = TypeVar("HalfT")

MAX_DEPTH = 4
"""Connectors within connectors: more is a configuration that contains itself."""


def build_connector(config: EngineConfig, registry: Registry, environment: Environment) -> Connector | None:
    """The configured connector; None if there is none. Raises PluginError and ConfigError."""
    if config.connector.name is None:
        return None
    build = connector_builder(registry, environment)
    return cast("Connector", registry.create("connector", config.connector.name, environment, build=build))


def connector_builder(registry: Registry, environment: Environment, depth: int = MAX_DEPTH) -> ConnectorBuilder:
    """The `build` that a connector's hook gets. depth: how many connectors may still be made within one another."""

    def build(name: str, options: Mapping[str, Any]) -> Connector:
        if not depth:
            raise ConfigError(f"The connector {name!r} is nested deeper than {MAX_DEPTH} connectors.")
        plugin = registry.load("connector", name)
        problems = plugin.problems(environment)
        if problems:
            raise plugin.row.error("; ".join(problems), plugin.install_hint() or "Leave it out.")
        inner = {"build": connector_builder(registry, environment, depth - 1)}
        return cast("Connector", registry.build(plugin, inner, options))

    return build


def scheduler_half(
    connector: Connector, prepared: PreparedModel, breakers: Breakers, layout: KVCacheLayout, report: WorkerReport
) -> GuardedConnector:
    """The deciding half, guarded. Raises PluginError if it cannot be built."""
    from llmkit.scheduling.guarded_connector import GuardedConnector

    config, registry = prepared.config, prepared.registry
    new_id = itertools.count(1).__next__
    length = config.model.max_model_len or 0
    role, size = config.connector.role, report.memory.block_bytes

    def breaker_of(name: str, number: int) -> Breaker:
        return breakers.of("connector", name, number)

    context = SchedulerContext(layout, report.fingerprint, 1, length, role, new_id, size, breaker_of)
    half = _built(config, lambda: connector.scheduler_half(context))
    _check_kind(config, half, SchedulerConnector)
    breaker = breakers.of("connector", registry.chosen("connector").name)
    return GuardedConnector(half, breaker, new_id, registry.calls("connector"))


def worker_transfers(
    setup: WorkerSetup, fingerprint: str, layout: KVCacheLayout, kv_caches: Sequence[torch.Tensor]
) -> WorkerTransfers | None:
    """The moving half of this worker, guarded and with the cache registered; None without a connector.

    Raises PluginError if it cannot be built or does not take the cache."""
    from llmkit.execution.worker_transfers import WorkerTransfers

    config = setup.config
    connector = build_connector(config, setup.registry, detect_environment(config.execution.device))
    if connector is None:
        return None
    context = WorkerContext(setup.rank, setup.world_size, fingerprint, config.connector.role)

    def built() -> WorkerConnector:
        half = connector.worker_half(context)
        half.register(layout, kv_caches)
        return half

    half = _built(config, built)
    _check_kind(config, half, WorkerConnector)
    return WorkerTransfers(half, len(kv_caches))


def _built(config: EngineConfig, build: Callable[[], HalfT]) -> HalfT:
    """What `build` returns. Whatever goes wrong is the plugin's fault and stops the start."""
    try:
        return build()
    except LlmkitError:
        raise
    except Exception as error:
        raise PluginError(f"The connector {config.connector.name!r} failed to start: {described(error)}.") from error


def _check_kind(config: EngineConfig, half: object, kind: type) -> None:
    if not isinstance(half, kind):
        raise PluginError(
            f"The connector {config.connector.name!r} made a {type(half).__name__} where a {kind.__name__} is expected."
        )
