"""The worker half of a connector as the model runner sees it: called in the order of the step, unable to disturb it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from llmkit.errors import described, shown
from llmkit.hookspecs.attention import AttentionBackend
from llmkit.hookspecs.connector import TransferReport

if TYPE_CHECKING:
    import torch

    from llmkit.hookspecs.attention import AttentionBatch, AttentionLayer, AttentionQuery, Support
    from llmkit.hookspecs.connector import WorkerConnector
    from llmkit.scheduling.plan import InDoubt, StepTransfers


class WorkerTransfers:
    """Drives a worker half. What it raises becomes failed blocks, those of the step's loads, and a fault that goes back
    with the report: the core counts them, and after too many has nothing moved for a while.

    A step: `begin`, the forward pass with the backend that `watched` returns, `finish`; or `break_off`, if the pass
    has failed.
    """

    def __init__(self, half: WorkerConnector, num_layers: int) -> None:
        self._half = half
        self._num_layers = num_layers
        self._step: StepTransfers | None = None
        self._moving = False
        self._failed_blocks: frozenset[int] = frozenset()
        self._loaded: frozenset[int] = frozenset()
        self._unstored: frozenset[int] = frozenset()
        self._under_way: dict[int, frozenset[int]] = {}
        self._holds: set[int] = set()
        self._sync_blocks: frozenset[int] = frozenset()
        self._faults: list[str] = []

    def begin(self, transfers: StepTransfers | None) -> None:
        """Start the transfers of a step."""
        self._step = transfers
        self._moving = False
        self._sync_blocks = frozenset()
        if transfers is None:
            return
        self._sync_blocks = transfers.sync_blocks
        if transfers.in_doubt is not None:
            self._answer(transfers.in_doubt)
        self._under_way |= transfers.loads
        self._holds |= set(transfers.holds)
        if transfers.cancelled:
            self.cancel(transfers.cancelled)
        if transfers.payload is not None:
            self._moving = True
            self._guarded("start_load", lambda: self._half.start_load(transfers.payload))
            return
        self._fail_step()  # the connector has left out what it was told of
        if transfers.wait_s:
            self.wait(transfers.wait_s)

    def _answer(self, in_doubt: InDoubt) -> None:
        never = {load: blocks for load, blocks in in_doubt.loads.items() if load not in self._under_way}
        self._loaded = self._loaded.union(never)
        self._failed_blocks = self._failed_blocks.union(*never.values())
        self._unstored |= in_doubt.holds - self._holds

    def skip(self, transfers: StepTransfers | None) -> None:
        """The step of these transfers could not even begin."""
        self._step = transfers
        self._fail_step()

    def watched(self, backend: AttentionBackend) -> AttentionBackend:
        """`backend`, with the connector's calls around each layer where the step moves something."""
        return WatchedBackend(backend, self) if self._moving else backend

    def before_layer(self, layer: int) -> None:
        """The synchronous loads of this layer must be in place."""
        if self._moving:
            self._guarded("wait_for_layer", lambda: self._half.wait_for_layer(layer))

    def after_layer(self, layer: int) -> None:
        """This layer has written its keys and values."""
        if self._moving:
            self._guarded("save_layer", lambda: self._half.save_layer(layer))

    def cancel(self, load_ids: Collection[int]) -> None:
        """Nobody waits for these loads any more."""
        self._call("cancel", lambda: self._half.cancel(load_ids))

    def wait(self, seconds: float) -> None:
        """Until a transfer has finished, or so long."""
        self._call("wait", lambda: self._half.wait(seconds))

    def wait_for_save(self) -> None:
        """Until the step's blocks may be overwritten; nothing of the step is left to do for the calls that follow."""
        if self._moving:
            self._guarded("wait_for_save", self._half.wait_for_save)
        self._moving = False

    def finish(self) -> TransferReport:
        """End the step; what has finished since the last one."""
        self.wait_for_save()
        told: TransferReport | None = self._call("report", self._reported)
        if told is None:  # whatever failed is not known: nothing that is under way can be trusted
            self._failed_blocks = self._failed_blocks.union(self._sync_blocks, *self._under_way.values())
            told = TransferReport()
        report = TransferReport(
            self._loaded | told.loaded,
            self._unstored | told.released,
            self._failed_blocks | told.failed_blocks,
            told.counts,
            self._unstored | told.failed_holds,
            told.part_faults,
        )
        self._loaded = self._unstored = self._failed_blocks = self._sync_blocks = frozenset()
        for load_id in report.loaded:
            self._under_way.pop(load_id, None)
        self._holds -= report.released
        return report

    def _reported(self) -> TransferReport:
        report: object = self._half.report()
        if not isinstance(report, TransferReport):
            raise TypeError(f"it returned {shown(report)}, which is no TransferReport")
        parts = (frozenset(report.loaded), frozenset(report.released), frozenset(report.failed_blocks))
        failed_holds = frozenset(report.failed_holds)
        if not all(type(id_) is int for part in (*parts, failed_holds) for id_ in part):
            raise TypeError(f"it returned {shown(report)}: an id is no integer")
        counts = {str(name): int(number) for name, number in report.counts.items()}
        part_faults = tuple((str(part), str(words)) for part, words in report.part_faults)
        return TransferReport(*parts, counts, failed_holds, part_faults)

    def take_faults(self) -> list[str]:
        """What was wrong with the connector since the last time, in words."""
        faults, self._faults = self._faults, []
        return faults

    def break_off(self) -> None:
        """The step has failed: nothing of its synchronous transfers may go on behind it."""
        for layer in range(self._num_layers):
            self.before_layer(layer)
        self.wait_for_save()

    def close(self) -> None:
        """Stop transfers."""
        self._call("close", self._half.close)

    def _guarded(self, name: str, call: Callable[[], Any]) -> None:
        """A call without which the step's loads cannot be trusted."""
        faults = len(self._faults)
        self._call(name, call)
        if len(self._faults) != faults:
            self._fail_step()

    def _fail_step(self) -> None:
        self._moving = False
        if self._step is not None:
            loads = self._step.loads
            self._failed_blocks = self._failed_blocks.union(self._step.sync_blocks, *loads.values())
            self._loaded = self._loaded.union(loads)
            self._unstored = self._unstored.union(self._step.holds)

    def _call(self, name: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            self._faults.append(f"{name}() failed: {described(error)}")
            return None


class WatchedBackend(AttentionBackend):
    """An attention backend that tells the connector before and after each layer."""

    def __init__(self, backend: AttentionBackend, transfers: WorkerTransfers) -> None:
        self._backend = backend
        self._transfers = transfers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def support(self, query: AttentionQuery) -> Support:
        return self._backend.support(query)

    def plan(self, batch: AttentionBatch) -> Any:
        return self._backend.plan(batch)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
    ) -> torch.Tensor:
        self._transfers.before_layer(layer.index)
        output = self._backend.forward(layer, query, key, value, kv_cache, metadata)
        self._transfers.after_layer(layer.index)
        return output


class ReportMerger:
    """Makes one report out of those of `world_size` workers: an id counts once all of them have named it, a block has
    failed as soon as one of them says so."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._loaded: dict[int, int] = {}
        self._released: dict[int, int] = {}
        self._failed_holds: set[int] = set()

    def merge(self, reports: Iterable[TransferReport | None]) -> TransferReport:
        """The reports of one step, one a worker; None from a worker that has failed."""
        given = [report for report in reports if report is not None]
        self._failed_holds.update(*(report.failed_holds for report in given))
        released = self._complete(self._released, (report.released for report in given))
        failed_holds = released & self._failed_holds
        self._failed_holds -= failed_holds
        return TransferReport(
            self._complete(self._loaded, (report.loaded for report in given)),
            released,
            frozenset(block for report in given for block in report.failed_blocks),
            added_up(report.counts for report in given),
            failed_holds,
            tuple(fault for report in given for fault in report.part_faults),
        )

    def _complete(self, counts: dict[int, int], named: Iterable[frozenset[int]]) -> frozenset[int]:
        for ids in named:
            for id_ in ids:
                counts[id_] = counts.get(id_, 0) + 1
        complete = frozenset(id_ for id_, count in counts.items() if count >= self._world_size)
        for id_ in complete:
            del counts[id_]
        return complete


def added_up(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sums of several workers' counts, by name."""
    total: dict[str, int] = {}
    for one in counts:
        for name, change in one.items():
            total[name] = total.get(name, 0) + change
    return total
