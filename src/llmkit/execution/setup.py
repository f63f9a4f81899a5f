"""What a worker is started with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmkit.config import EngineConfig
    from llmkit.execution.memory import MemoryPlan
    from llmkit.frontend.model_source import ModelSource
    from llmkit.kv_cache.layout import KVGroup
    from llmkit.registry import Registry

LoadProgress = Callable[[int, int | None], None]
"""Called while weights are read, with the bytes done and the bytes in all (None: unknown)."""


@dataclass(frozen=True)
class WorkerSetup:
    """The resolved configuration: every default filled in (`config`), the model's files and architecture (`source`),
    and the registry to build plugins from. `rank` of `world_size` workers.

    progress: told of the bytes read; used by workers in this process only.
    """

    config: EngineConfig
    source: ModelSource
    registry: Registry
    rank: int = 0
    world_size: int = 1
    progress: LoadProgress | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class WorkerReport:
    """What a worker says once its weights are loaded: the memory plan, the KV groups of its layers, and the block
    and page size that its attention backend takes. fingerprint: of what lies in a block, see
    `llmkit.execution.fingerprint`; empty without a connector."""

    memory: MemoryPlan
    groups: tuple[KVGroup, ...]
    block_size: int
    page_size: int
    fingerprint: str = ""
