"""Events of the prefix cache, for whoever mirrors its content: routers, offload tiers, monitors.

Each is a msgspec struct that encodes to a map with the key `type`. Hashes are the full content hashes
(bytes); `with_short_hashes` gives the form with 64-bit integers that goes over the wire by default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from llmkit.kv_cache.hashing import ExtraKey, HashChain

AnyHash = bytes | int


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="BlockStored"):
    """Consecutive blocks of a sequence became findable.

    block_hashes: one per block, in order. parent_block_hash: hash of the block before them, None at the start
    of a sequence. token_ids: block_size per block. group: KV group. lora_name, lora_id: adapter, if any.
    """

    block_hashes: tuple[AnyHash, ...]
    parent_block_hash: AnyHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str = "GPU"
    lora_name: str | None = None
    group: int = 0


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="BlockRemoved"):
    """Blocks were reused: their content is no longer there."""

    block_hashes: tuple[AnyHash, ...]
    medium: str = "GPU"
    group: int = 0


class AllBlocksCleared(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="AllBlocksCleared"):
    """The prefix cache was reset."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


def short_hash(block_hash: AnyHash) -> int:
    """The first 64 bits of a hash as an unsigned integer, big-endian; an integer is returned as it is."""
    return block_hash if isinstance(block_hash, int) else int.from_bytes(block_hash[:8], "big")


def with_short_hashes(event: KVEvent) -> KVEvent:
    """`event` with 64-bit integers for hashes."""
    if isinstance(event, AllBlocksCleared):
        return event
    hashes = _shortened(event.block_hashes)
    if isinstance(event, BlockRemoved):
        return msgspec.structs.replace(event, block_hashes=hashes)
    parent = None if event.parent_block_hash is None else short_hash(event.parent_block_hash)
    return msgspec.structs.replace(event, block_hashes=hashes, parent_block_hash=parent)


def _shortened(hashes: Sequence[AnyHash]) -> tuple[int, ...]:
    return tuple(short_hash(block_hash) for block_hash in hashes)


class EventReporter:
    """Makes events out of what happens and hands them to `on_event`; does nothing if that is None.

    Removals are collected while blocks are taken and reported together, one event per group, when the books
    agree again: `on_event` may look at the manager, and what it raises reaches the manager's caller.
    """

    def __init__(self, on_event: Callable[[KVEvent], None] | None) -> None:
        self._on_event = on_event
        self.enabled = on_event is not None
        self._removed: dict[int, list[bytes]] = {}

    def removed(self, group: int, block_hash: bytes) -> None:
        """Content of a block was forgotten; reported by the next `flush`."""
        self._removed.setdefault(group, []).append(block_hash)

    def flush(self) -> None:
        """Report the removals since the last time."""
        if self._removed:
            removed, self._removed = self._removed, {}
            for group, hashes in removed.items():
                self._emit(BlockRemoved(block_hashes=tuple(hashes), group=group))

    def stored(
        self,
        group: int,
        columns: Sequence[int],
        chain: HashChain,
        token_ids: Sequence[int],
        extra_keys: Sequence[ExtraKey],
    ) -> None:
        """Blocks in these ascending columns of a sequence became findable: one event per run without a
        gap."""
        lora = next((str(key.value) for key in extra_keys if key.tag == "lora"), None)
        size, first = chain.block_size, columns[0]
        for column, following in zip(columns, [*columns[1:], -1], strict=True):
            end = column + 1
            if following == end:
                continue
            self._emit(
                BlockStored(
                    block_hashes=tuple(chain.hashes[first:end]),
                    parent_block_hash=chain.hashes[first - 1] if first else None,
                    token_ids=list(token_ids[first * size : end * size]),
                    block_size=size,
                    lora_name=lora,
                    group=group,
                )
            )
            first = following

    def cleared(self) -> None:
        """The whole cache was emptied."""
        self._emit(AllBlocksCleared())

    def _emit(self, event: KVEvent) -> None:
        if self._on_event is not None:
            self._on_event(event)
