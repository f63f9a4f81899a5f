"""Settings of an engine: what there is, where a value came from, and what is wrong with it."""

from llmkit.config.engine_config import EngineConfig
from llmkit.config.flags import Flag, all_flags
from llmkit.config.load import LoadedConfig, Setting, load_config
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
from llmkit.config.server_section import ServerConfig

__all__ = [
    "EngineConfig",
    "LoadedConfig",
    "Setting",
    "load_config",
    "Flag",
    "all_flags",
    "AttentionConfig",
    "ConnectorConfig",
    "ExecutionConfig",
    "KVCacheConfig",
    "ModelConfig",
    "ObservabilityConfig",
    "ParallelConfig",
    "PluginsConfig",
    "SchedulerConfig",
    "ServerConfig",
    "StructuredConfig",
]
