"""The memory plan: what each part takes and how many KV blocks are left room for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmkit.errors import OutOfMemoryError

if TYPE_CHECKING:
    from llmkit.config.sections import KVCacheConfig

GIB = 1 << 30
MIB = 1 << 20
_MOST_SWAP_SPACE = 4 * GIB  # unless more is asked for: it is pinned, which takes about a second a gigabyte


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part, and the result. `limited_by` says in words what set `num_blocks`.

    total: memory of the device. usable: what the engine may bring it to, other users included; usable_rule: how that
    comes about, in words. block_size: tokens of a block; block_bytes: its size over all layers. graphs: of decode
    steps, on a GPU.
    """

    total: int
    usable: int
    weights: int
    activations: int
    other: int
    block_bytes: int
    num_blocks: int
    limited_by: str
    block_size: int = 0
    graphs: int = 0
    usable_rule: str = ""

    @property
    def cache(self) -> int:
        """Bytes of the KV cache."""
        return self.num_blocks * self.block_bytes

    def describe(self) -> str:
        """One paragraph for people."""
        tokens = f", {self.num_blocks * self.block_size} tokens" if self.block_size else ""
        return (
            f"{self._limit()} {self._parts()} The KV cache gets {self.num_blocks} blocks of "
            f"{readable(self.block_bytes)} ({readable(self.cache)}{tokens}), limited by {self.limited_by}."
        )

    def _limit(self) -> str:
        rule = f": {self.usable_rule}" if self.usable_rule else ""
        return f"Of {readable(self.total)} of memory, {readable(self.usable)} may be in use{rule}."

    def _parts(self) -> str:
        graphs = f"graphs {readable(self.graphs)}, " if self.graphs else ""
        return (
            f"Weights take {readable(self.weights)}, activations of a full step {readable(self.activations)}, {graphs}"
            f"everything else {readable(self.other)}."
        )


@dataclass(frozen=True)
class MemoryUse:
    """What is there and what the model takes, in bytes.

    utilization_key: the setting that limits usable. usable, usable_rule, other, graphs: see MemoryPlan. free: what is
    left for the cache if that setting is ignored.
    """

    total: int
    usable: int
    weights: int
    activations: int
    other: int
    free: int
    utilization_key: str
    graphs: int = 0
    usable_rule: str = ""


@dataclass(frozen=True)
class CacheNeeds:
    """block_bytes, block_size: of a block. blocks_per_sequence: for the longest sequence, all KV groups together.
    max_num_seqs, max_model_len: the limits this follows from."""

    block_bytes: int
    block_size: int
    blocks_per_sequence: int
    max_num_seqs: int
    max_model_len: int

    @property
    def most_useful(self) -> int:
        """Blocks beyond which nothing is gained; 1 more than are handed out, for the null block."""
        return self.max_num_seqs * self.blocks_per_sequence + 1


def plan_memory(use: MemoryUse, needs: CacheNeeds, cache: KVCacheConfig) -> MemoryPlan:
    """Decide how many blocks the KV cache gets.

    num_blocks or memory_gib, if set; else what the parts leave of the usable memory, but no more than max_num_seqs
    sequences of max_model_len tokens can use. Raises OutOfMemoryError if a size that was set is not there, or if
    what is left cannot hold a single sequence.
    """
    if cache.num_blocks is not None:
        return _checked_size(use, needs, cache.num_blocks, "the setting num_blocks")
    if cache.memory_gib is not None:
        blocks = int(cache.memory_gib * GIB) // max(1, needs.block_bytes)
        return _checked_size(use, needs, blocks, "the setting memory_gib")
    left = use.usable - use.weights - use.activations - use.graphs - use.other
    blocks = max(0, left) // max(1, needs.block_bytes)
    if blocks >= needs.most_useful:
        reason = f"what {needs.max_num_seqs} sequences (max_num_seqs) of {needs.max_model_len} tokens can use"
        return _plan(use, needs, needs.most_useful, reason)
    plan = _plan(use, needs, blocks, f"memory ({use.utilization_key})")
    if blocks < needs.blocks_per_sequence + 1:
        raise OutOfMemoryError(_shortage(plan, needs), hint=_advice(use, needs, blocks))
    return plan


def plan_host_blocks(swap_space_gib: float | None, plan: MemoryPlan, free: int) -> int:
    """How many blocks of host memory preempted sequences can be swapped out to.

    swap_space_gib: the setting; None: as much as the cache, at most 4 GiB and a quarter of what is free. free: bytes of
    host memory that nothing else is meant for. Raises OutOfMemoryError if a size that was set is not there.
    """
    if not plan.block_bytes:
        return 0
    if swap_space_gib is None:
        size = min(plan.cache, _MOST_SWAP_SPACE, max(0, free) // 4)
    else:
        size = int(swap_space_gib * GIB)
        if size > free:
            raise OutOfMemoryError(
                f"swap_space_gib asks for {readable(size)} of host memory, but only {readable(max(0, free))} are free.",
                hint="Lower swap_space_gib; 0 does without.",
            )
    return size // plan.block_bytes


def _checked_size(use: MemoryUse, needs: CacheNeeds, blocks: int, reason: str) -> MemoryPlan:
    plan = _plan(use, needs, blocks, reason)
    setting = reason.removeprefix("the setting ")
    if blocks < 2:
        raise OutOfMemoryError(
            f"{setting} gives the KV cache {blocks} blocks of {readable(needs.block_bytes)}; it must give at least 2.",
            hint=f"Raise {setting}.",
        )
    if plan.cache > use.free:
        fitting = max(0, use.free) // needs.block_bytes
        raise OutOfMemoryError(
            f"{setting} asks for a KV cache of {readable(plan.cache)}, but only {readable(max(0, use.free))} of "
            f"{readable(use.total)} are free. {plan._parts()}",
            hint=f"Lower {setting}: {fitting} blocks ({fitting * needs.block_bytes / GIB:.2f} GiB) fit.",
        )
    return plan


def _plan(use: MemoryUse, needs: CacheNeeds, blocks: int, reason: str) -> MemoryPlan:
    return MemoryPlan(
        total=use.total,
        usable=use.usable,
        weights=use.weights,
        activations=use.activations,
        other=use.other,
        block_bytes=needs.block_bytes,
        num_blocks=blocks,
        limited_by=reason,
        block_size=needs.block_size,
        graphs=use.graphs,
        usable_rule=use.usable_rule,
    )


def _shortage(plan: MemoryPlan, needs: CacheNeeds) -> str:
    needed = (needs.blocks_per_sequence + 1) * needs.block_bytes
    left = plan.usable - plan.weights - plan.activations - plan.graphs - plan.other
    room = (
        f"That leaves {readable(left)} for the KV cache"
        if left > 0
        else f"That is {readable(-left)} more than there is, with nothing left for the KV cache"
    )
    return (
        f"The model does not fit. {plan._limit()} {plan._parts()} {room}; one sequence of {needs.max_model_len} tokens "
        f"(max_model_len) needs {readable(needed)}."
    )


def _advice(use: MemoryUse, needs: CacheNeeds, blocks: int) -> str:
    if blocks < 2:
        return (
            f"Raise {use.utilization_key}, lower max_num_batched_tokens or max_num_seqs, choose a quantization, or use "
            "a smaller model."
        )
    # With sliding windows more would fit; this is safe for every model.
    length = (blocks - 1) * needs.max_model_len // needs.blocks_per_sequence
    return f"Lower max_model_len to {max(1, length)} or less, or raise {use.utilization_key}."


def readable(size: int) -> str:
    """Bytes for people."""
    for unit, scale, digits in (("GiB", GIB, 2), ("MiB", MIB, 1), ("KiB", 1 << 10, 1)):
        if abs(size) >= scale:
            return f"{size / scale:.{digits}f} {unit}"
    return f"{size} bytes"
