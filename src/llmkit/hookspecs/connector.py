"""Kind `connector`: moves KV blocks between the cache of this engine and somewhere else: host memory, disk,
another engine.

A connector has two halves. The *scheduler half* lives beside the scheduler and decides: how much of a request it
can load, what to load and store in a step, what must be kept when a request ends. The *worker half* lives beside
the KV tensors, one in every worker, and moves bytes. The only way from the first to the second is the transfer
object that `plan_transfers` returns, which travels with the step plan; the only way back is `TransferReport`.

A block whose load failed is never attended to: the core frees it and computes the tokens again, or ends the request
with an error, as `connector` is configured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmkit.hookspecs.markers import hookspec

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

    from llmkit.hookspecs.scheduler import RequestView
    from llmkit.kv_cache.layout import KVCacheLayout
    from llmkit.scheduling.plan import StepPlan


@dataclass(frozen=True, slots=True)
class LoadOffer:
    """How many tokens beyond those already in the cache can be loaded for a request: a multiple of the block size.

    `asynchronous`: the load runs over several steps; the request waits, its blocks held, until a TransferReport
    names it. Otherwise the tokens are in place when the step that starts the load runs its attention.
    """

    num_tokens: int
    asynchronous: bool = False


@dataclass(frozen=True, slots=True)
class Retention:
    """What happens to the blocks of a request that has ended.

    `keep`: the blocks stay held until a TransferReport lists the request as `saved`. `params`: returned to the client
    as `kv_transfer_params`, None for nothing.
    """

    keep: bool = False
    params: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What one worker half has finished since its last report. Every request id and block is reported once.

    loaded: requests whose asynchronous load has ended, well or not. saved: requests whose blocks are no longer
    read. failed_blocks: allocation blocks that were to be loaded and hold nothing usable.
    """

    loaded: frozenset[str] = field(default_factory=frozenset)
    saved: frozenset[str] = field(default_factory=frozenset)
    failed_blocks: frozenset[int] = field(default_factory=frozenset)


class SchedulerConnector(ABC):
    """The deciding half. Called from the engine's step loop only; must not block on input or output.

    Requests are read-only views. What it returns is checked by the core: an offer beyond the prompt is cut.
    """

    @abstractmethod
    def offer(self, request: RequestView, num_computed_tokens: int) -> LoadOffer | None:
        """What can be loaded for the waiting `request`, of which `num_computed_tokens` (whole blocks) are in the cache.

        None: not known yet, ask again next step. Has no side effects; called again if the request cannot enter.
        """

    @abstractmethod
    def allocated(self, request: RequestView, block_ids: Sequence[Sequence[int]], offer: LoadOffer) -> None:
        """The core took `offer` (its `num_tokens` may be smaller, 0 for nothing) and gave the request these
        allocation blocks per KV group, those of the tokens already computed included."""

    @abstractmethod
    def plan_transfers(self, plan: StepPlan) -> Any:
        """Once a step, after scheduling: what the worker halves are to load and store, as an opaque object that
        pickles; None for nothing. Starts no transfer itself and must not change `plan`."""

    @abstractmethod
    def request_finished(self, request: RequestView, block_ids: Sequence[Sequence[int]]) -> Retention:
        """The request has ended or was aborted, and its blocks are about to be freed."""

    def preempted(self, request: RequestView) -> None:
        """The request lost its blocks and will be scheduled again; forget what was planned for them."""
        return

    def update(self, report: TransferReport) -> None:
        """The workers' reports of a step, merged: `loaded` and `saved` once all workers have said so."""
        return

    def reset(self) -> None:
        """The prefix cache was reset: what is stored elsewhere must not be offered any more."""
        return

    def close(self) -> None:
        """The engine closes. May be called twice."""
        return


class WorkerConnector(ABC):
    """The moving half, one per worker. All calls come from the worker's thread, in the order of the step:
    `start_load`, then per attention layer `wait_for_layer` (before it) and `save_layer` (after it), `wait_for_save`,
    `report`."""

    @abstractmethod
    def register(self, layout: KVCacheLayout, kv_caches: Sequence[torch.Tensor]) -> None:
        """The KV cache exists. `kv_caches[i]` is the tensor of attention layer i; dimension 0 is the kernel's page,
        `layout.pages_per_block` pages a block. The tensors stay the same until `close`."""

    @abstractmethod
    def start_load(self, transfers: Any) -> None:
        """Begin the loads of this step; `transfers` is what `plan_transfers` returned. Must not wait for them."""

    def wait_for_layer(self, layer: int) -> None:
        """Return once the synchronous loads of attention layer `layer` are in place (on the current stream)."""
        return

    def save_layer(self, layer: int) -> None:
        """The step has written the keys and values of attention layer `layer`; its stores may begin."""
        return

    def wait_for_save(self) -> None:
        """Return once the blocks of this step may be overwritten by the next one."""
        return

    @abstractmethod
    def report(self) -> TransferReport:
        """What has finished. Never raises for a failed transfer: that is a failed block."""

    def close(self) -> None:
        """Stop transfers, let go of the tensors. May be called twice."""
        return


class Connector(ABC):
    """Builds the two halves, each in the process that needs it; building one must not build the other."""

    @abstractmethod
    def scheduler_half(self, layout: KVCacheLayout) -> SchedulerConnector:
        """Called once, in the engine core's process, when the KV layout is known."""

    @abstractmethod
    def worker_half(self, rank: int, world_size: int) -> WorkerConnector:
        """Called once in each worker; `register` follows when the cache has been allocated."""


@hookspec(firstresult=True)
def llmkit_connector(options: BaseModel | None) -> Connector:  # type: ignore[empty-body]
    """Build the connector. `options` is an instance of `info.options`, validated; None if there is none.

    .. versionadded:: 0.1
    """
