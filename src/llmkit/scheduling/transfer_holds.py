"""Blocks that nobody may write to because a connector reads them, or is about to be told of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from llmkit.hookspecs.connector import FilledBlock, max_held_blocks
from llmkit.kv_cache.block_pool import NULL_BLOCK
from llmkit.kv_cache.manager import KVCacheManager


class TransferHolds:
    """Filled blocks are held from their commit until the connector has been told of them, so that it can have them
    stored before they are written to again; holds of the connector's own until they are released."""

    def __init__(self) -> None:
        self._manager: KVCacheManager | None = None
        self._filled: list[FilledBlock] = []
        self._holds: dict[int, tuple[int, ...]] = {}
        self._planned: set[int] = set()

    def __len__(self) -> int:
        """Holds of the connector's own."""
        return len(self._holds)

    @property
    def num_blocks(self) -> int:
        """Blocks in these holds."""
        return len({block for blocks in self._holds.values() for block in blocks})

    def bind(self, manager: KVCacheManager) -> None:
        """Use this manager from now on, in which nothing is held yet. What the connector reads stays held."""
        self._manager = manager
        self._filled.clear()
        for blocks in self._holds.values():
            manager.hold(blocks)

    def filled(self, group: int, block: int, block_hash: bytes, column: int, parent_hash: bytes | None) -> None:
        """A block became findable."""
        self._filled.append(FilledBlock(group, block, block_hash, column, parent_hash))
        self._kv.hold((block,))

    @property
    def has_filled(self) -> bool:
        """Whether there are filled blocks that the connector has not been told of."""
        return bool(self._filled)

    def peek_filled(self) -> tuple[FilledBlock, ...]:
        """These blocks; they stay held until `drop_filled`."""
        return tuple(self._filled)

    def drop_filled(self) -> None:
        """The connector has been told of them."""
        filled, self._filled = self._filled, []
        self._kv.release([block.block_id for block in filled])

    def give_up_filled(self) -> bool:
        """Release the newest filled block that nobody else holds: it will not be stored. False if there is none."""
        for position in reversed(range(len(self._filled))):
            block = self._filled[position].block_id
            if self._kv.references(block) == 1:
                del self._filled[position]
                self._kv.release((block,))
                return True
        return False

    def counted(self) -> Counter[int]:
        """Block → how many holds are on it, filled blocks included."""
        blocks = Counter(block.block_id for block in self._filled)
        for held in self._holds.values():
            blocks.update(held)
        del blocks[NULL_BLOCK]
        return blocks

    @property
    def planned(self) -> frozenset[int]:
        """Ids of the connector's holds that began with the plan of a step."""
        return frozenset(self._planned & self._holds.keys())

    def add(self, holds: Mapping[int, Sequence[int]], *, planned: bool = False) -> str | None:
        """Hold blocks for the connector. Returns what is wrong with `holds`, and does nothing then. planned: with the
        step that is being planned, whose workers are told the ids."""
        wrong = self._wrong(holds)
        if wrong is None:
            if planned:
                self._planned.update(holds)
            for hold_id, blocks in holds.items():
                self._holds[hold_id] = tuple(blocks)
                self._kv.hold(blocks)
        return wrong

    def _wrong(self, holds: object) -> str | None:
        if not isinstance(holds, Mapping):
            return f"holds are a {type(holds).__name__}, not a mapping"
        for hold_id, blocks in holds.items():
            if type(hold_id) is not int or hold_id in self._holds:
                return "a hold's id is not a new one"
            if not isinstance(blocks, Sequence) or not all(self._has_content(block) for block in blocks):
                return "a hold names blocks that nobody uses"
        held = set().union(*self._holds.values(), *holds.values())
        if len(held) > max_held_blocks(self._kv.layout):
            return f"{len(held)} blocks would be held, more than may be"
        return None

    def _has_content(self, block: object) -> bool:
        if type(block) is not int or not 0 <= block <= self._kv.num_blocks:
            return False
        return not block or self._kv.references(block) > 0 or self._kv.is_cached(block)

    def release(self, hold_ids: Iterable[int]) -> set[int]:
        """These holds are over. Returns the ids that there are none of."""
        unknown = set()
        for hold_id in hold_ids:
            blocks = self._holds.pop(hold_id, None)
            if blocks is None:
                unknown.add(hold_id)
            else:
                self._kv.release(blocks)
            self._planned.discard(hold_id)
        return unknown

    @property
    def _kv(self) -> KVCacheManager:
        assert self._manager is not None
        return self._manager
