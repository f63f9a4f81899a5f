"""EngineConfig: all sections together, and the checks that involve more than one setting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from llmkit.config.sections import (
    AttentionConfig,
    ConnectorConfig,
    ExecutionConfig,
    KVCacheConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    PluginsConfig,
    ProcessConfig,
    SchedulerConfig,
    Section,
    StructuredConfig,
)
from llmkit.config.server_section import ServerConfig


class EngineConfig(Section):
    """Everything that decides how an engine is built. Immutable; `model_copy(update=...)` makes a changed one."""

    model: ModelConfig = ModelConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    attention: AttentionConfig = AttentionConfig()
    kv_cache: KVCacheConfig = KVCacheConfig()
    connector: ConnectorConfig = ConnectorConfig()
    structured: StructuredConfig = StructuredConfig()
    execution: ExecutionConfig = ExecutionConfig()
    parallel: ParallelConfig = ParallelConfig()
    process: ProcessConfig = ProcessConfig()
    server: ServerConfig = ServerConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    plugins: PluginsConfig = PluginsConfig()
    extensions: tuple[str, ...] = Field((), description="Observers of the engine to activate, by plugin name.")

    @model_validator(mode="after")
    def _settings_agree(self) -> EngineConfig:
        for problem in contradictions(self):
            raise PydanticCustomError("contradiction", "{text}", {"text": problem.text, "keys": problem.keys})
        return self


@dataclass(frozen=True)
class Contradiction:
    """Settings that cannot hold together: their dotted keys, and one sentence."""

    keys: tuple[str, ...]
    text: str


def contradictions(config: EngineConfig) -> Iterator[Contradiction]:
    """What is wrong with `config` as a whole, as far as that can be said without knowing the model."""
    yield from _scheduler_contradictions(config)
    yield from _model_contradictions(config)
    yield from _server_contradictions(config)
    process = config.process
    if process.heartbeat_timeout_s <= process.heartbeat_s:
        yield Contradiction(
            ("process.heartbeat_timeout_s", "process.heartbeat_s"),
            f"heartbeat_timeout_s ({process.heartbeat_timeout_s:g}) must be longer than heartbeat_s "
            f"({process.heartbeat_s:g})",
        )
    cache = config.kv_cache
    if cache.num_blocks is not None and cache.memory_gib is not None:
        yield Contradiction(
            ("kv_cache.num_blocks", "kv_cache.memory_gib"),
            f"num_blocks ({cache.num_blocks}) and memory_gib ({cache.memory_gib:g}) both set the size of the KV cache; "
            "give one of them",
        )
    if config.connector.name is not None and not cache.enable_prefix_caching:
        yield Contradiction(
            ("connector.name", "kv_cache.enable_prefix_caching"),
            f"The connector {config.connector.name!r} finds stored blocks by the hash of their prefix, so "
            "enable_prefix_caching must be true",
        )


def _scheduler_contradictions(config: EngineConfig) -> Iterator[Contradiction]:
    scheduler = config.scheduler
    budget = scheduler.max_num_batched_tokens
    if scheduler.enable_chunked_prefill or budget is None:
        return
    keys = ("scheduler.max_num_batched_tokens", "scheduler.enable_chunked_prefill")
    sequences, length = scheduler.max_num_seqs, config.model.max_model_len
    if sequences is not None and budget < sequences:
        yield Contradiction(
            (*keys, "scheduler.max_num_seqs"),
            f"Without chunked prefill, max_num_batched_tokens ({budget}) must be at least max_num_seqs ({sequences})",
        )
    if length is not None and budget < length:
        yield Contradiction(
            (*keys, "model.max_model_len"),
            f"Without chunked prefill a whole prompt must fit one step: max_num_batched_tokens ({budget}) must be at "
            f"least max_model_len ({length})",
        )


def _model_contradictions(config: EngineConfig) -> Iterator[Contradiction]:
    if not config.model.skip_tokenizer:
        return
    for name in ("tokenizer", "chat_template"):
        if getattr(config.model, name) is not None:
            yield Contradiction(
                (f"model.{name}", "model.skip_tokenizer"),
                f"{name} is set, but skip_tokenizer says to load no tokenizer",
            )


def _server_contradictions(config: EngineConfig) -> Iterator[Contradiction]:
    server = config.server
    if server.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(server, name) is not None:
                yield Contradiction(
                    (f"server.{name}", "server.ssl_certfile"), f"{name} is set, but TLS needs ssl_certfile as well"
                )
    if server.allow_credentials and "*" in server.allowed_origins:
        yield Contradiction(
            ("server.allow_credentials", "server.allowed_origins"),
            "With allow_credentials the allowed_origins must be named; * would let every web page act for its visitor",
        )
