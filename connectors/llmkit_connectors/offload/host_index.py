"""The books of the host tier: which block lies in which slot, who is using it, and which one leaves next.

Only books: the bytes are the worker halves', which copy to and from the slots that are named here. All workers use the
same slots for the same blocks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from llmkit_connectors.offload.block_key import BlockKey
from llmkit_connectors.offload.eviction import EvictionPolicy, PolicyName, make_policy


@dataclass(slots=True, eq=False)
class HostBlock:
    """A block in the host tier, or one that is on its way there.

    slot: where its bytes are. users: transfers that read or write the slot; while there are any it is not given to
    another block. ready: whether the bytes are there. forgotten: not to be found any more, only finished. parent: the
    block before it in its sequence, if that was there when it came. num_children: blocks whose parent it is.
    """

    key: BlockKey
    slot: int
    parent: HostBlock | None = None
    num_children: int = 0
    users: int = 1
    ready: bool = False
    forgotten: bool = False


class HostIndex:
    """Slots 0 to num_slots - 1. Used from one thread.

    A block is of use only together with all before it in its sequence. Where these are not kept anywhere else, it says
    which one is its parent when it comes: a parent does not leave before its children, never makes room for one, and
    once it is missing nothing leaves for those behind it. So of a sequence that is longer than the tier, the beginning
    stays.
    """

    def __init__(self, num_slots: int, policy: PolicyName) -> None:
        """num_slots: at least 1."""
        self._policy_name: PolicyName = policy
        self._num_slots = num_slots
        self._policy: EvictionPolicy = make_policy(policy, num_slots)
        self._free: list[int] = []
        self._num_touched = 0  # slots from here on were never used; a tier of many small blocks is not listed
        self._blocks: dict[BlockKey, HostBlock] = {}
        self.num_evictions = 0
        self.num_busy = 0
        """Slots that some transfer uses."""

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def num_used(self) -> int:
        """Slots that hold or await a block."""
        return self._num_touched - len(self._free)

    def find(self, key: BlockKey) -> HostBlock | None:
        """The block, ready or on its way; None if there is none."""
        return self._blocks.get(key)

    def reserve(self, key: BlockKey, parent_hash: bytes | None = None) -> HostBlock | None:
        """A slot for a block that is not there, with one user, who fills it; the block that leaves next gives it up if
        need be. None if no block may leave now. parent_hash: of the block before it in its sequence, if it is of no use
        without that."""
        parent = None if parent_hash is None else self._blocks.get(BlockKey(key.group, parent_hash))
        if parent is not None:
            parent.num_children += 1
        if self._free:
            slot = self._free.pop()
        elif self._num_touched < self._num_slots:
            slot = self._num_touched
            self._num_touched += 1
        elif parent is None and parent_hash is not None:
            return None
        else:
            victim = self._policy.victim(key, self._may_leave)
            if victim is None:
                if parent is not None:
                    parent.num_children -= 1
                return None
            assert isinstance(victim, BlockKey)
            slot = self._take_out(victim).slot
            self.num_evictions += 1
        block = HostBlock(key, slot, parent)
        self._blocks[key] = block
        self.num_busy += 1
        self._policy.insert(key)
        return block

    def lacks_parent(self, key: BlockKey, parent_hash: bytes | None) -> bool:
        """Whether nothing will ever leave for this block, as the one before it is not there."""
        return parent_hash is not None and BlockKey(key.group, parent_hash) not in self._blocks

    def acquire(self, block: HostBlock) -> None:
        """One more transfer uses the slot."""
        self.num_busy += not block.users
        block.users += 1

    def release(self, block: HostBlock) -> None:
        """One of the transfers is done with the slot."""
        block.users -= 1
        self.num_busy -= not block.users
        if block.forgotten and not block.users:
            self._free.append(block.slot)

    def fail(self, block: HostBlock) -> None:
        """Its bytes did not arrive, or are not to be trusted; the caller stays its user until `release`."""
        if not block.forgotten:
            self._policy.remove(block.key)
            self._forget(block)

    def use(self, key: BlockKey) -> None:
        """The block, which is there, serves a request."""
        self._policy.use(key)

    def refresh(self, key: BlockKey) -> None:
        """Let the block, if it is there, be the last of its kind to leave."""
        if key in self._blocks:
            self._policy.refresh(key)

    def clear(self) -> None:
        """Find nothing any more; transfers under way keep their slots until they are done."""
        for block in list(self._blocks.values()):
            self._forget(block)
        self._policy = make_policy(self._policy_name, self._num_slots)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot is in one place and policy and books agree. Slots of forgotten blocks
        that are still in use are in none."""
        held = [block.slot for block in self._blocks.values()]
        assert len({*held, *self._free}) == len(held) + len(self._free), "a slot is in two places"
        assert all(0 <= slot < self._num_touched for slot in [*held, *self._free]), "a slot is out of range"
        assert len(self._policy) == len(self._blocks), f"{len(self._policy)} keys are ordered, {len(held)} are there"
        assert all(block.users >= 0 and not block.forgotten for block in self._blocks.values()), "users are miscounted"
        children = Counter(id(block.parent) for block in self._blocks.values() if block.parent is not None)
        assert all(block.num_children == children[id(block)] for block in self._blocks.values()), (
            "children are miscounted"
        )

    def _may_leave(self, key: object) -> bool:
        assert isinstance(key, BlockKey)
        block = self._blocks[key]
        return not block.users and not block.num_children

    def _take_out(self, key: BlockKey) -> HostBlock:
        block = self._blocks.pop(key)
        if block.parent is not None:
            block.parent.num_children -= 1
            block.parent = None
        return block

    def _forget(self, block: HostBlock) -> None:
        self._take_out(block.key)
        block.forgotten = True
        if not block.users:
            self._free.append(block.slot)
