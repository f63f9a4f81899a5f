"""A worker owns one device: the model's weights, the KV cache, and the runner that uses both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from llmkit.errors import EngineClosedError, OutOfMemoryError, described
from llmkit.execution.building import DTYPES, BuiltModel, build_model
from llmkit.execution.compiling import compile_ahead
from llmkit.execution.connector_half import worker_transfers
from llmkit.execution.fingerprint import WeightsChecksum, kv_fingerprint
from llmkit.execution.freeing import give_back_memory, keep_freed_memory, return_freed_memory
from llmkit.execution.measuring import (
    HostMemory,
    cache_needs,
    estimated_activations,
    estimated_graphs,
    gpu_use,
    host_memory,
    host_use,
    limits,
    measured_activations,
)
from llmkit.execution.memory import MemoryPlan, plan_memory
from llmkit.execution.model_runners import concurrent_steps, runner_for
from llmkit.execution.profiling import TorchProfile
from llmkit.execution.ready_memory import make_ready
from llmkit.execution.setup import LoadProgress, WorkerReport, WorkerSetup
from llmkit.execution.worker_transfers import WorkerTransfers
from llmkit.jit.rehearsal import start_compiler
from llmkit.recycled_memory import recycling

if TYPE_CHECKING:
    from llmkit.execution.model_runner import ModelRunner
    from llmkit.hookspecs.executor import StepHandle
    from llmkit.kv_cache.layout import KVCacheLayout
    from llmkit.scheduling.plan import StepPlan, StepResult


_NO_HOST_MEMORY = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed")


class Worker:
    """Life: `load`, `allocate`, any number of `execute`, `close`; or `dry_run`, `close`.

    Calls come from one thread. While a worker lives, torch's number of threads is the configured one.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._device = torch.device(setup.config.execution.device)
        self._built: BuiltModel | None = None
        self._runner: ModelRunner | None = None
        self._transfers: WorkerTransfers | None = None
        self._fingerprint = ""
        self._layout: KVCacheLayout | None = None
        self.profile = TorchProfile(self._device)
        self._threads_before: int | None = None
        # Of this process's other users of the GPU.
        self._allocated_before = torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

    def dry_run(self) -> WorkerReport:
        """Choose the plugins and plan the memory; nothing is read or allocated. Raises as `load` does."""
        built = build_model(self._setup, torch.device("meta"))
        return _report(built, self._plan_memory(built, host_memory(), loaded=False))

    def load(self, progress: LoadProgress | None = None) -> WorkerReport:
        """Build the model, read its weights, measure, and plan the KV cache.

        progress is told of the bytes read; by default the setup's own. Raises PluginError, ModelError, ConfigError,
        OutOfMemoryError.
        """
        self._set_threads()
        before = host_memory()
        if self._device.type == "cpu":
            return_freed_memory()
        source = self._setup.source
        with torch.no_grad(), recycling(), _device_memory_explained("the weights of the model"):
            built = build_model(self._setup, self._device)
            start_compiler(self._device)  # it is needed once the weights are there
            source.format.expect(built.model.weight_shapes())
            tensors = source.tensors()
            checksum = WeightsChecksum()
            if self._setup.config.connector.name is not None:
                tensors = checksum.counted(tensors)
            built.model.load_weights(
                _counted(tensors, source.format.size_bytes(source.path), progress or self._setup.progress)
            )
        self._built = built
        self._setup = replace(self._setup, progress=None)  # whoever watches the start is not told of a wake-up
        if self._setup.config.connector.name is not None:
            self._fingerprint = kv_fingerprint(built, self._setup, checksum.hexdigest())
        give_back_memory(self._device)
        if self._device.type == "cpu":
            keep_freed_memory()
        return _report(built, self._plan_memory(built, before, loaded=True), self._fingerprint)

    def allocate(self, layout: KVCacheLayout) -> None:
        """Create the KV cache as `layout` says; the worker can then execute. Raises OutOfMemoryError."""
        if self._built is None:
            raise EngineClosedError("The worker has no model: load must come before allocate.")
        self._layout = layout
        length, _, sequences = limits(self._setup.config)
        calls = self._setup.registry.calls
        with _device_memory_explained("the KV cache"):
            self._runner = runner_for(self._device, self._built.kernels)(
                self._built.model,
                self._built.backend,
                layout,
                vocab_size=self._built.config.vocab_size,
                max_num_seqs=sequences,
                max_model_len=length,
                device=self._device,
                model_calls=calls("model"),
                attention_calls=calls("attention"),
            )
            self._runner.warm_up()
        if self._device.type == "cpu":
            compile_ahead(self._runner, self._setup, layout)
            itemsize = DTYPES[self._setup.config.model.dtype].itemsize
            make_ready(self._built, self._setup.config, itemsize, self._runner.kv)
        self._transfers = worker_transfers(self._setup, self._fingerprint, layout, self._runner.kv_caches)
        self._runner.transfers = self._transfers

    @property
    def max_concurrent_steps(self) -> int:
        """Steps that may be under way at once."""
        return concurrent_steps(self._device.type)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises OutOfMemoryError, or whatever went wrong on the device."""
        return self.submit(plan).result()

    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step, behind those under way. Raises as `execute` does, or its handle does."""
        if self._runner is None:
            raise EngineClosedError("The worker has no KV cache: allocate must come before execute.")
        with _device_memory_explained("a step's activations"):
            return self._runner.submit(plan)

    def settle(self) -> None:
        """Wait for all steps under way, whoever has their handles."""
        if self._runner is not None:
            self._runner.settle()

    def sleep(self, level: int) -> None:
        """Free the cache and, at level 2 or on a GPU, the weights. Not with a connector, which knows the cache."""
        self._runner = None
        if level >= 2 or self._device.type != "cpu":
            self._built = None
        give_back_memory(self._device)

    def wake_up(self, part: str) -> None:
        """Read the weights again, or make the cache anew, unless it is there. Raises as `load` and `allocate` do."""
        if part == "weights" and self._built is None:
            self.load()
        elif part == "kv_cache" and self._runner is None and self._layout is not None:
            self.allocate(self._layout)

    def close(self) -> None:
        """Stop the connector, free weights and cache. May be called twice."""
        self.profile.discard()
        if self._transfers is not None:
            self._transfers.close()
            self._transfers = None
        self._built = self._runner = None
        give_back_memory(self._device)
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None

    def _set_threads(self) -> None:
        threads = self._setup.config.execution.num_threads
        if threads is not None and self._device.type == "cpu" and self._threads_before is None:
            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(threads)

    def _plan_memory(self, built: BuiltModel, before: HostMemory, *, loaded: bool) -> MemoryPlan:
        config = self._setup.config
        weights = built.model.parameter_bytes()
        itemsize = DTYPES[config.model.dtype].itemsize
        activations = estimated_activations(built, config, itemsize)
        if self._device.type == "cuda":
            if loaded:
                weights = torch.cuda.memory_allocated(self._device) - self._allocated_before
                # After a sleep, what is launched is compiled.
                first = self._layout is None
                activations = measured_activations(built, config, self._device, decodes=first)
            graphs = estimated_graphs(built, config, itemsize)
            use = gpu_use(config, self._device, weights, activations, graphs, self._allocated_before)
        else:
            use = host_use(config, before, weights, activations)
        return plan_memory(use, cache_needs(built, config), config.kv_cache)


def _report(built: BuiltModel, memory: MemoryPlan, fingerprint: str = "") -> WorkerReport:
    return WorkerReport(memory, built.groups, built.block_size, built.page_size, fingerprint)


def _counted(
    tensors: Iterable[tuple[str, torch.Tensor]], total: int | None, progress: LoadProgress | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass tensors through and tell `progress` of their bytes; holds none of them."""
    done = 0
    if progress is not None:
        progress(0, total)
    for name, tensor in tensors:
        size = tensor.nbytes
        yield name, tensor
        del tensor
        done += size
        if progress is not None:
            progress(done, total)


@contextmanager
def _device_memory_explained(what: str) -> Iterator[None]:
    """Turn torch's out-of-memory error into one that says what there was no room for and what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"The GPU has no memory left for {what}: {str(error).splitlines()[0]}",
            hint="Lower gpu_memory_utilization, max_num_batched_tokens or max_num_seqs, or free the GPU.",
        ) from error
    except (RuntimeError, MemoryError) as error:
        # On the host torch raises a plain RuntimeError, also if the number of bytes is beyond 64 bits.
        if not isinstance(error, MemoryError) and not any(sign in str(error) for sign in _NO_HOST_MEMORY):
            raise
        raise OutOfMemoryError(
            f"There is no memory for {what}: {described(error).splitlines()[0]}",
            hint="Lower max_num_batched_tokens or max_num_seqs, or use a smaller model.",
        ) from error
