"""From a configuration to a running engine, or to a report of what would run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmkit.config import EngineConfig
from llmkit.config.combined import publisher_extension
from llmkit.engine.collection import Aside, collection_paused, freeze_imports, freeze_later_imports, set_aside
from llmkit.engine.device import resolve_device
from llmkit.engine.resolve import resolve_config
from llmkit.errors import ConfigError, OutOfMemoryError
from llmkit.kv_cache.layout import KVCacheLayout
from llmkit.openmp import wait_briefly
from llmkit.registry import Registry, detect_environment

if TYPE_CHECKING:
    from llmkit.engine.core import EngineCore
    from llmkit.execution.memory import MemoryPlan
    from llmkit.execution.setup import LoadProgress, WorkerReport
    from llmkit.frontend.model_source import ModelSource
    from llmkit.frontend.token_vocabulary import TokenVocabulary
    from llmkit.frontend.tokenizer import Tokenizer
    from llmkit.grammars.backends import GrammarBackends
    from llmkit.grammars.service import GrammarService
    from llmkit.hookspecs.executor import Executor
    from llmkit.hookspecs.plugin import Environment
    from llmkit.hookspecs.scheduler import SchedulerPolicy
    from llmkit.kv_cache.events import KVEvent
    from llmkit.registry import Observer
    from llmkit.registry.breakers import Breakers

logger = logging.getLogger("llmkit.engine")


@dataclass(frozen=True)
class PreparedModel:
    """A model that was found and whose settings are complete and consistent; no weight has been read.

    config: every default filled in. breakers: of the plugins that are guarded at run time. grammars: the grammar
    engines; None without a tokenizer, whose tokens they need.
    """

    config: EngineConfig
    source: ModelSource
    tokenizer: Tokenizer | None
    registry: Registry
    environment: Environment
    breakers: Breakers
    grammars: GrammarBackends | None = None


@dataclass(frozen=True)
class Engine:
    """A running engine and what it was built from. aside: what the garbage collector leaves alone meanwhile."""

    core: EngineCore
    prepared: PreparedModel
    report: WorkerReport
    layout: KVCacheLayout
    observers: tuple[Observer, ...] = ()
    aside: Aside = field(default_factory=Aside)

    @property
    def config(self) -> EngineConfig:
        """The resolved configuration."""
        return self.prepared.config

    def close(self) -> None:
        """Stop the engine, free what it holds, tell the observers. May be called twice."""
        if not self.core.closed:
            self.core.close()
            self.aside.end()
            for observer in self.observers:
                observer.llmkit_engine_stopped()


@dataclass(frozen=True)
class DryRun:
    """What an engine would be made of: the resolved configuration, the memory plan (`report.memory`) and the
    cache's layout. `registry.selections` says which plugins were chosen, why, and why not the others."""

    config: EngineConfig
    source: ModelSource
    registry: Registry
    report: WorkerReport
    layout: KVCacheLayout


@collection_paused()
def prepare_model(
    config: EngineConfig, registry: Registry | None = None, *, online: bool = False, resolved: bool = False
) -> PreparedModel:
    """Find the model, load its tokenizer, fill in every default and check the settings against the model.

    online: with the defaults of a server. resolved: `config` is that of a prepared model, whose defaults are filled in
    already, and which no longer shows what was asked for. Takes seconds: no weight is read. Raises ConfigError,
    PluginError, ModelError.
    """
    from llmkit.frontend.model_source import load_tokenizer, resolve_model

    wait_briefly()
    registry = registry or Registry.discover(config.plugins)
    registry.check_options()
    device = resolve_device(config.execution.device)
    environment = detect_environment(device)
    freeze_imports()
    source = resolve_model(config, registry, environment)
    if not resolved:
        config = resolve_config(
            config, source.config, device=device, environment=environment, gpu_bytes=_gpu_bytes(device), online=online
        )
    tokenizer = load_tokenizer(source, config, registry, environment)
    breakers = registry.breakers()
    grammars = _grammars(config, source, tokenizer, registry, environment, breakers)
    return PreparedModel(config, source, tokenizer, registry, environment, breakers, grammars)


def build_engine(
    config: EngineConfig, registry: Registry | None = None, progress: LoadProgress | None = None
) -> Engine:
    """Build everything that the configuration of a prepared model chooses and load the model. `progress` is told of
    the bytes read.

    Raises ConfigError, PluginError, ModelError, OutOfMemoryError; what was started by then is stopped again.
    """
    return start_engine(prepare_model(config, registry, resolved=True), progress)


def start_engine(prepared: PreparedModel, progress: LoadProgress | None = None) -> Engine:
    """Load the weights of a prepared model and start its engine. Raises as `build_engine` does."""
    with prepared.registry.blaming():
        with collection_paused():
            executor = _executor(prepared)  # brings large libraries along
        if prepared.grammars is not None and prepared.config.structured.preload_grammars:
            prepared.grammars.preload()
        freeze_later_imports()  # a collection that walks over them takes a tenth of a second, beside the steps
        with set_aside() as aside:
            return _start(prepared, executor, progress, aside)


def _start(prepared: PreparedModel, executor: Executor, progress: LoadProgress | None, aside: Aside) -> Engine:
    from llmkit.engine.core import EngineCore
    from llmkit.execution.connector_half import build_connector, scheduler_half
    from llmkit.execution.setup import WorkerSetup
    from llmkit.scheduling.scheduler import Scheduler

    config = prepared.config
    policy = _policy(prepared)
    breakers = prepared.breakers
    observers = prepared.registry.observers(active_extensions(config), prepared.environment, breakers)
    connector = build_connector(config, prepared.registry, prepared.environment)
    max_concurrent_steps = _concurrent_steps(config, executor)
    try:
        report = executor.start(WorkerSetup(config, prepared.source, prepared.registry, progress=progress))
        layout = layout_of(report, config, swap=policy.preemption == "swap")
        executor.allocate(layout)
        calls = prepared.registry.calls
        policy_breaker = breakers.of("scheduler", prepared.registry.chosen("scheduler").name)
        half = None if connector is None else scheduler_half(connector, prepared, breakers, layout, report)
        grammars = _grammar_service(prepared)
        scheduler = Scheduler(
            config,
            layout,
            policy,
            max_concurrent_steps,
            _kv_listener(observers),
            calls("scheduler"),
            policy_breaker,
            half,
            grammars=grammars,
            vocab_size=prepared.source.config.get("vocab_size"),
        )
        core = EngineCore(scheduler, executor, observers, calls("executor"), breakers)
        if grammars is not None and config.structured.preload_grammars:
            grammars.preload()
    except BaseException:
        executor.close()
        raise
    for observer in observers:
        observer.llmkit_engine_started(config)
    _tell_of_idle_options(prepared.registry)
    return Engine(core, prepared, report, layout, observers, aside)


def plan_engine(config: EngineConfig, registry: Registry | None = None, *, online: bool = False) -> DryRun:
    """What `build_engine` or, if `online`, a server would build, without reading weights. Raises as it does."""
    from llmkit.execution.connector_half import build_connector
    from llmkit.execution.setup import WorkerSetup
    from llmkit.execution.worker import Worker

    prepared = prepare_model(config, registry, online=online)
    swap = _policy(prepared).preemption == "swap"
    build_connector(prepared.config, prepared.registry, prepared.environment)
    _executor(prepared).close()
    worker = Worker(WorkerSetup(prepared.config, prepared.source, prepared.registry))
    try:
        report = worker.dry_run()
    finally:
        worker.close()
    layout = layout_of(report, prepared.config, swap=swap)
    _tell_of_idle_options(prepared.registry)
    return DryRun(prepared.config, prepared.source, prepared.registry, report, layout)


def _tell_of_idle_options(registry: Registry) -> None:
    for key in registry.options_without_effect():
        logger.warning("options are set for %s, which was not chosen: they have no effect", key)


def layout_of(report: WorkerReport, config: EngineConfig, *, swap: bool) -> KVCacheLayout:
    """The cache's layout. swap: with swap space on the host.

    Raises OutOfMemoryError if not a single usable block fits (block 0 is never handed out), or not the swap space.
    """
    memory = report.memory
    if memory.num_blocks < 2:
        raise OutOfMemoryError(
            f"the KV cache needs at least 2 blocks of {memory.block_bytes} bytes, but only {memory.num_blocks} fit "
            f"({memory.limited_by}): of {memory.usable} usable bytes, weights take {memory.weights}, activations "
            f"{memory.activations}, other things {memory.other}.",
            hint="Lower max_num_batched_tokens or max_num_seqs, or allow more memory.",
        )
    return KVCacheLayout(
        groups=report.groups,
        num_blocks=memory.num_blocks,
        block_size=report.block_size,
        page_size=report.page_size,
        enable_prefix_caching=config.kv_cache.enable_prefix_caching,
        num_host_blocks=_host_blocks(memory, config) if swap else 0,
    )


def _host_blocks(memory: MemoryPlan, config: EngineConfig) -> int:
    from llmkit.execution.measuring import host_memory
    from llmkit.execution.memory import plan_host_blocks

    if config.execution.device == "cpu":
        free = memory.total - memory.other - memory.weights - memory.activations - memory.cache
    else:
        free = host_memory().free
    return plan_host_blocks(config.kv_cache.swap_space_gib, memory, free)


def _grammars(
    config: EngineConfig,
    source: ModelSource,
    tokenizer: Tokenizer | None,
    registry: Registry,
    environment: Environment,
    breakers: Breakers,
) -> GrammarBackends | None:
    from llmkit.frontend.generation_defaults import end_of_sequence_ids
    from llmkit.frontend.token_vocabulary import TokenVocabulary
    from llmkit.grammars.backends import GrammarBackends

    if tokenizer is None:
        if config.structured.backend != "auto":
            raise ConfigError(
                f"structured.backend is {config.structured.backend!r}, but the model has no tokenizer, which grammars "
                "need.",
                hint="Give it one (model.tokenizer), or leave structured.backend at auto.",
            )
        return None

    def vocabulary() -> TokenVocabulary:
        generation = source.generation_config if config.model.generation_config else {}
        size = source.config["vocab_size"]
        eos = end_of_sequence_ids(source.config, generation, tokenizer.eos_token_id, size)
        return TokenVocabulary.of(tokenizer, size, eos)

    grammars = GrammarBackends(config.structured.backend, registry, environment, vocabulary, breakers)
    grammars.require()
    return grammars


def _grammar_service(prepared: PreparedModel) -> GrammarService | None:
    from llmkit.grammars.service import GrammarService

    if prepared.grammars is None:
        return None
    return GrammarService(prepared.grammars, prepared.config.structured)


def active_extensions(config: EngineConfig) -> tuple[str, ...]:
    """Names of the extensions that the configuration asks for, by whatever setting."""
    publisher = config.kv_cache.event_publisher
    published = () if publisher is None else (publisher_extension(publisher),)
    return tuple(dict.fromkeys((*config.extensions, *published)))


def _policy(prepared: PreparedModel) -> SchedulerPolicy:
    from llmkit.hookspecs.scheduler import SchedulerPolicy

    policy = prepared.registry.create("scheduler", prepared.config.scheduler.policy, prepared.environment)
    assert isinstance(policy, SchedulerPolicy)
    return policy


def _kv_listener(observers: Sequence[Observer]) -> Callable[[KVEvent], None] | None:
    """Takes events of the prefix cache to the extensions that want them; None if there are none."""
    listening = [observer for observer in observers if observer.implements("llmkit_kv_event")]
    if not listening:
        return None

    def tell(event: KVEvent) -> None:
        for observer in listening:
            observer.llmkit_kv_event(event)

    return tell


def _executor(prepared: PreparedModel) -> Executor:
    from llmkit.hookspecs.executor import Executor

    executor = prepared.registry.create("executor", prepared.config.execution.executor, prepared.environment)
    assert isinstance(executor, Executor)
    return executor


def _concurrent_steps(config: EngineConfig, executor: Executor) -> int:
    """How many steps may be under way. Raises ConfigError if more were asked for than the executor can carry."""
    wanted, possible = config.scheduler.async_scheduling, executor.concurrent_steps(config.execution.device)
    if wanted is True and possible < 2:
        raise ConfigError(
            "async_scheduling is true, but the chosen executor runs one step at a time on this device.",
            hint="Leave scheduler.async_scheduling at auto.",
        )
    return 1 if wanted is False else possible


def _gpu_bytes(device: str) -> int | None:
    if device == "cpu":
        return None
    import torch

    return int(torch.cuda.get_device_properties(device).total_memory)
