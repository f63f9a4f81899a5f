"""What the file tier knows of the files in its storage: sizes, and the order in which they go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from llmkit_connectors.offload.media import StoredFile


@dataclass(slots=True)
class _Known:
    size: int
    used: float


class FileIndex:
    """Sizes and times of last use (seconds since the epoch), least recently used first. No locks: the owner has one.

    Files appear in it when they are written or listed; what other processes do is known from the next listing on.
    """

    def __init__(self) -> None:
        self._files: OrderedDict[str, _Known] = OrderedDict()
        self._added: set[str] = set()
        self._dropped: set[str] = set()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def add(self, name: str, size: int, now: float) -> None:
        """`name` was written, or found, and is the most recently used."""
        self.drop(name)
        self._files[name] = _Known(size, now)
        self._added.add(name)
        self._dropped.discard(name)
        self.num_bytes += size

    def use(self, name: str, now: float) -> None:
        """`name` was read; nothing happens if it is unknown."""
        known = self._files.get(name)
        if known is not None:
            known.used = now
            self._files.move_to_end(name)

    def drop(self, name: str) -> int:
        """`name` is gone; how many bytes were known of it, 0 if it was not."""
        self._dropped.add(name)
        self._added.discard(name)
        known = self._files.pop(name, None)
        if known is None:
            return 0
        self.num_bytes -= known.size
        return known.size

    def oldest(self) -> str | None:
        """The least recently used file, None if there is none."""
        return next(iter(self._files), None)

    def listing_begins(self) -> None:
        """From now on, remember what is added and dropped: a listing may or may not show it."""
        self._added, self._dropped = set(), set()

    def relist(self, listed: Iterable[StoredFile]) -> None:
        """Replace what is known by a listing made since `listing_begins`, with what was added and dropped meanwhile."""
        before = self._files
        merged = {file.name: _Known(file.size, file.modified) for file in listed if file.name not in self._dropped}
        for name, known in before.items():
            if name in merged:
                merged[name].used = max(merged[name].used, known.used)
            elif name in self._added:
                merged[name] = known
        self._files = OrderedDict(sorted(merged.items(), key=lambda item: item[1].used))
        self.num_bytes = sum(known.size for known in self._files.values())
