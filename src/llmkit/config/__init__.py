"""Settings of an engine: what there is, where a value came from, and what is wrong with it."""

from llmkit.config.engine_config import EngineConfig
from llmkit.config.sections import (
    AttentionConfig,
    ConnectorConfig,
    ExecutionConfig,
    KVCacheConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    PluginsConfig,
    SchedulerConfig,
    StructuredConfig,
)

__all__ = [
    "EngineConfig",
    "AttentionConfig",
    "ConnectorConfig",
    "ExecutionConfig",
    "KVCacheConfig",
    "ModelConfig",
    "ObservabilityConfig",
    "ParallelConfig",
    "PluginsConfig",
    "SchedulerConfig",
    "StructuredConfig",
]
