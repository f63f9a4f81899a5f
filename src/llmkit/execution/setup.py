"""What a worker is started with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmkit.config import EngineConfig
    from llmkit.execution.memory import MemoryPlan
    from llmkit.frontend.model_source import ModelSource
    from llmkit.kv_cache.layout import KVGroup
    from llmkit.registry import Registry


@dataclass(frozen=True)
class WorkerSetup:
    """The resolved configuration: every default filled in (`config`), the model's files and architecture (`source`),
    and the registry to build plugins from. `rank` of `world_size` workers."""

    config: EngineConfig
    source: ModelSource
    registry: Registry
    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True)
class WorkerReport:
    """What a worker says once its weights are loaded: the memory plan, the KV groups of its layers, and the block
    and page size that its attention backend takes."""

    memory: MemoryPlan
    groups: tuple[KVGroup, ...]
    block_size: int
    page_size: int
