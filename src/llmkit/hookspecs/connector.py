"""Kind `connector`: moves KV blocks between the cache of this engine and somewhere else: host memory, disk,
another engine.

A connector has two halves. The *scheduler half* lives beside the scheduler and decides: how much of a request it
can load, what to load and store in a step, what must be kept when a request ends. The *worker half* lives beside
the KV tensors, one in every worker, and moves bytes. The only way from the first to the second is the payload
that `plan_transfers` returns, which travels with the step plan; the only way back is `TransferReport`.

A block whose load failed is never attended to: the core frees it and computes the tokens again, or ends the request
with an error, as `connector.load_failure_policy` says. What a connector raises goes no further: a load becomes a
computation, a store does not happen.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from llmkit.hookspecs.markers import hookspec
from llmkit.hookspecs.scheduler import RequestView

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

    from llmkit.kv_cache.layout import KVCacheLayout
    from llmkit.registry.breaker import Breaker

ConnectorRole = Literal["both", "producer", "consumer"]


class TransferView(RequestView, Protocol):
    """A sequence as a connector sees it: read-only and live. A request with n > 1 has several, which share
    `request_id`; `sequence_number` is unique for as long as the engine runs, and what a connector should know a
    sequence by."""

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """What the client sent along for the connector; checked by `SchedulerConnector.problems`."""
        ...

    @property
    def cache_salt(self) -> str | None: ...

    def token_ids(self, first: int = 0, last: int | None = None) -> list[int]:
        """The tokens known so far, prompt and output, or a slice of them."""
        ...

    def block_hashes(self, num_blocks: int | None = None) -> list[bytes]:
        """Content hashes of the first full blocks (at most `num_blocks`), as far as tokens are known.

        Each stands for all tokens up to the end of its block, and for cache salt and other keys; equal in every
        process. With `fingerprint`, KV group and rank they make a key of what is stored.
        """
        ...

    def block_ids(self) -> tuple[tuple[int, ...], ...]:
        """Its block table in each KV group; empty while it holds no blocks. 0 stands for a block that is not kept."""
        ...


@dataclass(frozen=True, slots=True)
class LoadOffer:
    """How many tokens beyond those already in the cache can be loaded for a request: a multiple of the block size.

    `asynchronous`: the load runs over several steps; the request waits, its blocks held, until a TransferReport
    names it. Otherwise the tokens are in place when the step that starts the load runs its attention.
    """

    num_tokens: int
    asynchronous: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """A load that the core wants: the blocks that hold tokens `first_token` to `first_token + num_tokens - 1` of
    `request`, both multiples of the block size. num_tokens may be smaller than what was offered.

    load_id: unique; what the worker half reports. block_ids: the whole table of each KV group; the columns to load
    are those from `first_token // block_size` on whose id is not 0 (a sliding window does not need all).
    """

    load_id: int
    request: TransferView
    first_token: int
    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    asynchronous: bool


@dataclass(frozen=True, slots=True)
class FilledBlock:
    """An allocation block whose content is certain and new to the cache: computed, or loaded.

    It stays as it is until `wait_for_save` of the step that is being planned has returned, longer if
    `TransferPlan.holds` says so. column: which block of its sequence it is. parent_hash: of the block before it, None
    for the first.
    """

    group: int
    block_id: int
    block_hash: bytes
    column: int
    parent_hash: bytes | None = None


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """A sequence in the step that is being planned: `num_new_tokens` tokens behind `num_computed_tokens`."""

    request: TransferView
    num_computed_tokens: int
    num_new_tokens: int


class StepView(Protocol):
    """The step that is being planned; it may have no rows.

    loads: the offers that the core took since the last one, with blocks for them: to be started in this step, or
    never. filled: blocks filled since the last one; none for a connector that is a consumer.
    """

    @property
    def step(self) -> int: ...
    @property
    def loads(self) -> Sequence[Load]: ...
    @property
    def rows(self) -> Sequence[ScheduledRow]: ...
    @property
    def filled(self) -> Sequence[FilledBlock]: ...

    def cached_block(self, group: int, block_hash: bytes) -> int | None:
        """The allocation block in which the prefix cache has this content now; None if it is not there. Who was told of
        a filled block, and could not store it then, can name this one in the holds of the step."""
        ...


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What the worker halves are to do in a step. payload: anything that pickles, given to each `start_load`.

    holds: hold id → allocation blocks that nobody writes to until a TransferReport lists the id as released, for
    stores that go on behind the step: blocks that are in use, filled ones, and those of `StepView.cached_block`. Ids
    come from `SchedulerContext.new_id`.
    """

    payload: Any
    holds: Mapping[int, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Retention:
    """What happens to the blocks of a sequence that has ended.

    holds: the blocks stay held under each of these ids (from `SchedulerContext.new_id`) until a TransferReport
    lists it as released. params: returned to the client as `kv_transfer_params`, None for nothing.
    """

    holds: Sequence[int] = ()
    params: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What one worker half has finished since its last report. Everything is reported once.

    loaded: ids of asynchronous loads that have ended, well or not; nothing writes to their blocks any more.
    released: ids of holds that are over, well or not. failed_blocks: allocation blocks that were to be loaded and hold
    nothing usable: of a synchronous load in the report of its own step, of an asynchronous one at the latest when it
    ends. failed_holds: those of `released` whose blocks were not stored; the core reports so what never ran.
    counts: name → change since the last report, of whatever the worker half counts for the scheduler half's `stats`;
    those of several workers are added up. part_faults: of a worker half that is made of several, (which one, what was
    wrong with it in words), for the scheduler half to count where it belongs (`SchedulerContext.breaker_of`).
    """

    loaded: frozenset[int] = field(default_factory=frozenset)
    released: frozenset[int] = field(default_factory=frozenset)
    failed_blocks: frozenset[int] = field(default_factory=frozenset)
    counts: Mapping[str, int] = field(default_factory=dict)
    failed_holds: frozenset[int] = field(default_factory=frozenset)
    part_faults: tuple[tuple[str, str], ...] = ()

    def __bool__(self) -> bool:
        """Whether it tells of anything."""
        return bool(self.loaded or self.released or self.failed_blocks or self.counts or self.part_faults)


def max_held_blocks(layout: KVCacheLayout) -> int:
    """See `SchedulerContext.max_held_blocks`."""
    return max(1, (layout.num_blocks - 1) // 2)


def _breaker_of_its_own(name: str, number: int) -> Breaker:
    from llmkit.registry.breakers import Breakers

    return Breakers().of("connector", name, number)


@dataclass(frozen=True, slots=True)
class SchedulerContext:
    """What a scheduler half is built with.

    fingerprint: hexadecimal; equal for two engines only if they have the same model (weights included), the same
    types and the same order of bytes in a block of the same size, so that one may load what the other has stored.
    role: "producer" is never asked for loads, "consumer" is never told of filled blocks. new_id: a number that
    neither the core nor another connector of this engine has used. block_bytes: size of a block over all layers of a
    worker, with whatever the attention backend adds; None: what the layout says. breaker_of: for a connector that is
    made of several, the breaker of one of them, by its name and which one of this name it is, from 1 on; the engine
    shows its faults beside all others'.
    held_share: of what may be in holds, the part that this connector may have.
    """

    layout: KVCacheLayout
    fingerprint: str
    world_size: int
    max_model_len: int
    role: ConnectorRole
    new_id: Callable[[], int]
    block_bytes: int | None = None
    breaker_of: Callable[[str, int], Breaker] = _breaker_of_its_own
    held_share: float = 1.0

    @property
    def max_held_blocks(self) -> int:
        """Different blocks that may be in holds at a time, half of the cache: a plan that would hold more is not
        carried out, so that the engine goes on whatever becomes of transfers. For one of several connectors it is a
        part of that."""
        return max(1, int(max_held_blocks(self.layout) * self.held_share))


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a worker half is built with: worker `rank` of `world_size`, each with its own part of every block."""

    rank: int
    world_size: int
    fingerprint: str
    role: ConnectorRole


class SchedulerConnector(ABC):
    """The deciding half. Called from the engine's step loop only; must not block on input or output.

    Requests are read-only views. What it returns is checked by the core: an offer beyond the known tokens is cut (one
    token is always left to compute), and one that makes no sense is no offer.
    """

    def problems(self, params: Mapping[str, Any]) -> list[str]:
        """What is wrong with the `kv_transfer_params` of a new request, a sentence each; any refuses the request."""
        return []

    @abstractmethod
    def offer(self, request: TransferView, num_computed_tokens: int) -> LoadOffer | None:
        """What can be loaded for the waiting `request`, of which `num_computed_tokens` (whole blocks) are in the cache.

        None: not known yet, ask again next step; others may go first. Has no side effects; called again if the
        request cannot enter. With sliding-window groups, `llmkit.kv_cache.groups.loadable_blocks` says how far a
        load can reach.
        """

    @abstractmethod
    def plan_transfers(self, step: StepView) -> TransferPlan | None:
        """Once a step, after scheduling: what the worker halves are to load and store; None for nothing. Starts no
        transfer itself. A load in `step.loads` that is impossible by now is still to be part of the payload, and to be
        reported as failed. Also called for steps without rows, when somebody waits or there is something to store."""

    def request_finished(self, request: TransferView, block_ids: Sequence[Sequence[int]]) -> Retention:
        """The sequence has ended or was aborted, and its blocks are about to be freed. Its filled blocks that
        `plan_transfers` has not been told of come with the next step, whatever is returned here."""
        return Retention()

    def has_more_to_store(self) -> bool:
        """Whether it would store more once a transfer is over. Asked after a report of one: the engine then makes
        another step for it, also when it has nothing to compute, and waits a moment for it when it closes."""
        return False

    def preempted(self, request: TransferView) -> None:
        """The request lost its blocks and will be scheduled again; a load of it that has not ended will be, and is
        not waited for."""
        return

    def update(self, report: TransferReport) -> None:
        """The workers' reports of a step, merged: an id once all workers have said so."""
        return

    def stats(self) -> Mapping[str, float]:
        """Numbers to show, by name: counts since the start, and sizes as they are. They are part of the engine's
        statistics, which may be asked for after every step."""
        return {}

    def reset(self) -> None:
        """The prefix cache was reset: what is stored elsewhere must not be offered any more."""
        return

    def close(self) -> None:
        """The engine closes. May be called twice."""
        return


class WorkerConnector(ABC):
    """The moving half, one per worker. All calls come from the worker's thread. A step with a payload: `start_load`,
    then per attention layer `wait_for_layer` (before it) and `save_layer` (after it), `wait_for_save`; every step
    ends with `report`.

    What it raises ends the transfers of the step: its loads have failed, its holds are over, and nothing may go on.
    """

    @abstractmethod
    def register(self, layout: KVCacheLayout, kv_caches: Sequence[torch.Tensor]) -> None:
        """The KV cache exists. `kv_caches[i]` is the tensor of attention layer i; dimension 0 is the kernel's page,
        `layout.pages_per_block` pages a block: block b is pages b * pages_per_block up to the next. Layers of
        different groups may share storage. The tensors stay the same until `close`."""

    @abstractmethod
    def start_load(self, payload: Any) -> None:
        """Begin the transfers of this step; `payload` is what `plan_transfers` returned. Must not wait for them."""

    def wait_for_layer(self, layer: int) -> None:
        """Return once the synchronous loads of attention layer `layer` are in place (on the current stream)."""
        return

    def save_layer(self, layer: int) -> None:
        """The step has written the keys and values of attention layer `layer`; its stores may begin."""
        return

    def wait_for_save(self) -> None:
        """Return once blocks that are stored without a hold may be overwritten by the next step."""
        return

    @abstractmethod
    def report(self) -> TransferReport:
        """What has finished. Never raises for a failed transfer: that is a failed block."""

    def cancel(self, load_ids: Collection[int]) -> None:
        """Nobody waits for these asynchronous loads any more. They may be broken off, and are reported all the same."""
        return

    def wait(self, seconds: float) -> None:
        """Nothing is computed until a transfer has finished: return when one has, after `seconds` at the latest."""
        time.sleep(seconds)

    def close(self) -> None:
        """Stop transfers, let go of the tensors. May be called twice."""
        return


class Connector(ABC):
    """Builds the two halves, each in the process that needs it; building one must not build the other."""

    @abstractmethod
    def scheduler_half(self, context: SchedulerContext) -> SchedulerConnector:
        """Called once, in the engine core's process, when the KV layout is known."""

    @abstractmethod
    def worker_half(self, context: WorkerContext) -> WorkerConnector:
        """Called once in each worker; `register` follows when the cache has been allocated."""


class ConnectorBuilder(Protocol):
    """Builds another connector, for one that is made of several."""

    def __call__(self, name: str, options: Mapping[str, Any]) -> Connector:
        """The connector called `name` with `options`. Raises PluginError and ConfigError."""
        ...


@hookspec(firstresult=True)
def llmkit_connector(options: BaseModel | None, build: ConnectorBuilder) -> Connector:  # type: ignore[empty-body]
    """Build the connector. `options` is an instance of `info.options`, validated; None if there is none. `build`
    builds others, for a connector that is made of several.

    .. versionadded:: 0.1
    """
