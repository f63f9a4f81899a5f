"""What the scheduler half tells the worker halves: which blocks go where. Pickles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from llmkit_connectors.offload.block_key import BlockKey

NO_SLOT = -1


class StoredBlock(NamedTuple):
    """An allocation block of the cache, and the slot that its content goes to."""

    key: BlockKey
    block_id: int
    slot: int


class LoadedBlock(NamedTuple):
    """An allocation block of the cache, and where its content comes from: a slot, or a file, which then also fills the
    slot if there is one."""

    key: BlockKey
    block_id: int
    slot: int
    from_file: bool


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """Copy blocks to slots; `hold_id` is released when that is done. Then, unless `write_id` is None, write the slots
    to files; `write_id` is released when nobody reads the slots any more."""

    hold_id: int
    write_id: int | None
    blocks: tuple[StoredBlock, ...]


@dataclass(frozen=True, slots=True)
class WriteOrder:
    """Write slots, which hold their blocks, to files; `write_id` is released when nobody reads the slots any more."""

    write_id: int
    blocks: tuple[tuple[BlockKey, int], ...]


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Load blocks; `load_id` is reported when nothing touches them and their slots any more."""

    load_id: int
    blocks: tuple[LoadedBlock, ...]


@dataclass(frozen=True, slots=True)
class Orders:
    """Of one step. epoch: part of the files' space, see `space_of`."""

    epoch: bytes
    stores: tuple[StoreOrder, ...]
    writes: tuple[WriteOrder, ...]
    loads: tuple[LoadOrder, ...]
