"""Which block leaves when the host tier is full: least recently used, or ARC.

A policy orders the keys of the blocks that are there; it holds no blocks. Every call takes constant time, except that
`victim` passes over keys which may not leave now; these then count as young, so that the next call does not meet them
again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Literal

Key = Hashable
MayLeave = Callable[[Key], bool]
PolicyName = Literal["lru", "arc"]


class EvictionPolicy(ABC):
    """The order in which keys leave. Each key is inserted once and is known until `victim` or `remove` takes it."""

    @abstractmethod
    def insert(self, key: Key) -> None:
        """`key`, which is not known, is there now."""

    @abstractmethod
    def use(self, key: Key) -> None:
        """The content of `key`, which is known, was of use again."""

    @abstractmethod
    def refresh(self, key: Key) -> None:
        """Make `key`, which is known, the youngest of its kind; does not count as a use."""

    @abstractmethod
    def victim(self, incoming: Key, may_leave: MayLeave) -> Key | None:
        """Take out the key that makes room for `incoming`, which is not known and is to be inserted next; None, with
        nothing taken out, if no key may leave."""

    @abstractmethod
    def remove(self, key: Key) -> None:
        """Forget `key`, and that it was ever there."""

    @abstractmethod
    def __len__(self) -> int:
        """How many keys are known."""


class LeastRecentlyUsed(EvictionPolicy):
    """The key whose last use is longest ago leaves."""

    def __init__(self) -> None:
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def insert(self, key: Key) -> None:
        self._keys[key] = None

    def use(self, key: Key) -> None:
        self._keys.move_to_end(key)

    refresh = use

    def victim(self, incoming: Key, may_leave: MayLeave) -> Key | None:  # noqa: ARG002
        key = _oldest(self._keys, may_leave)
        if key is not None:
            del self._keys[key]
        return key

    def remove(self, key: Key) -> None:
        self._keys.pop(key, None)

    def __len__(self) -> int:
        return len(self._keys)


class AdaptiveReplacement(EvictionPolicy):
    """ARC: two lists, of keys used once and of keys used again, whose sizes follow what turns out to be missed.

    A long scan of blocks that nobody asks for again cannot push out the ones that are asked for. Source: N. Megiddo,
    D. S. Modha: ARC: A Self-Tuning, Low Overhead Replacement Cache (FAST 2003). In the paper's terms `_once` is T1,
    `_again` T2, the ghosts B1 and B2, and `_target` p; `capacity` is c, in keys.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self._capacity = capacity
        self._target = 0.0
        self._once: OrderedDict[Key, None] = OrderedDict()
        self._again: OrderedDict[Key, None] = OrderedDict()
        self._ghosts_once: OrderedDict[Key, None] = OrderedDict()
        self._ghosts_again: OrderedDict[Key, None] = OrderedDict()
        self._recalled: Key | None = None
        self._recalled_from_again = False

    def insert(self, key: Key) -> None:
        self._recall(key)
        if self._recalled == key:
            self._again[key] = None
            self._recalled = None
        else:
            self._once[key] = None
        while len(self._once) + len(self._ghosts_once) > self._capacity and self._ghosts_once:
            self._ghosts_once.popitem(last=False)
        while len(self) + len(self._ghosts_once) + len(self._ghosts_again) > 2 * self._capacity and self._ghosts_again:
            self._ghosts_again.popitem(last=False)

    def use(self, key: Key) -> None:
        self._once.pop(key, None)
        self._again[key] = None
        self._again.move_to_end(key)

    def refresh(self, key: Key) -> None:
        (self._once if key in self._once else self._again).move_to_end(key)

    def victim(self, incoming: Key, may_leave: MayLeave) -> Key | None:
        self._recall(incoming)
        size = len(self._once)
        from_again = self._recalled == incoming and self._recalled_from_again
        # The paper's REPLACE.
        if size and (size > self._target or (from_again and size == self._target)):
            order = ((self._once, self._ghosts_once), (self._again, self._ghosts_again))
        else:
            order = ((self._again, self._ghosts_again), (self._once, self._ghosts_once))
        for keys, ghosts in order:
            key = _oldest(keys, may_leave)
            if key is not None:
                del keys[key]
                ghosts[key] = None
                return key
        return None

    def remove(self, key: Key) -> None:
        for keys in (self._once, self._again, self._ghosts_once, self._ghosts_again):
            keys.pop(key, None)

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    @property
    def num_ghosts(self) -> int:
        """Keys that have left and are remembered."""
        return len(self._ghosts_once) + len(self._ghosts_again)

    def _recall(self, key: Key) -> None:
        """If `key` left not long ago, it should have stayed: the list it left from is to grow. Once per return."""
        once, again = len(self._ghosts_once), len(self._ghosts_again)
        if key in self._ghosts_once:
            self._target = min(self._target + max(again / once, 1.0), self._capacity)
            del self._ghosts_once[key]
            self._recalled, self._recalled_from_again = key, False
        elif key in self._ghosts_again:
            self._target = max(self._target - max(once / again, 1.0), 0.0)
            del self._ghosts_again[key]
            self._recalled, self._recalled_from_again = key, True


def make_policy(name: PolicyName, capacity: int) -> EvictionPolicy:
    """The policy called `name` for a tier of `capacity` blocks."""
    return AdaptiveReplacement(capacity) if name == "arc" else LeastRecentlyUsed()


def _oldest(keys: OrderedDict[Key, None], may_leave: MayLeave) -> Key | None:
    for _ in range(len(keys)):
        key = next(iter(keys))
        if may_leave(key):
            return key
        keys.move_to_end(key)
    return None
