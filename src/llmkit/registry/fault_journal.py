"""Faults that outlive the process in which they happened, so that `llmkit plugins doctor` can tell of them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from llmkit.cache_folder import cache_folder
from llmkit.registry.breaker import FaultCount

logger = logging.getLogger(__name__)

KEPT_S = 14 * 86_400.0
"""How long a record is told of, in seconds."""


class Identity(Protocol):
    """A plugin of a package: a row, or the record of a choice."""

    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def distribution(self) -> str: ...
    @property
    def version(self) -> str: ...


@dataclass(frozen=True)
class FaultRecord:
    """A plugin was left alone because of its faults. times: how often so far; last_time: of the last, seconds since
    1970; num_faults, last_fault: as they were then, in that process."""

    kind: str
    name: str
    distribution: str
    version: str
    times: int
    last_time: float
    num_faults: int
    last_fault: str

    def describe(self) -> str:
        """For people, one sentence."""
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.last_time))
        often = "once" if self.times == 1 else f"{self.times} times"
        return (
            f"At run time it failed so often that it was left alone, {often}, last on {when} after {self.num_faults} "
            f"faults: {self.last_fault}"
        )


class FaultJournal:
    """A small file per plugin in `folder`; by default `faults` in llmkit's cache folder. Nothing here ever raises: a
    journal that cannot be kept is no reason to disturb an engine.
    """

    def __init__(self, folder: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder or cache_folder() / "faults"
        self._clock = clock

    def add(self, plugin: Identity, count: FaultCount) -> None:
        """The breaker of a plugin has opened."""
        before = self.find(plugin)
        record = FaultRecord(
            plugin.kind,
            plugin.name,
            plugin.distribution,
            plugin.version,
            times=before.times + 1 if before else 1,
            last_time=self._clock(),
            num_faults=count.num_faults,
            last_fault=(count.last_fault or "")[:500],
        )
        path = self._path(plugin)
        scratch = path.with_suffix(f".{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch.write_text(json.dumps(asdict(record)), encoding="utf-8")
            scratch.replace(path)
        except OSError as error:
            logger.debug("faults of %s:%s are not recorded: %s", plugin.kind, plugin.name, error)

    def find(self, plugin: Identity) -> FaultRecord | None:
        """What is recorded of this version of a plugin, None if nothing, or nothing recent."""
        record = self._read(self._path(plugin))
        return record if record is not None and _identity(record) == _identity(plugin) else None

    def recent(self) -> list[FaultRecord]:
        """All that is recorded and recent, by kind and name."""
        found = [record for path in self._folder.glob("*.json") if (record := self._read(path)) is not None]
        return sorted(found, key=_identity)

    def _read(self, path: Path) -> FaultRecord | None:
        try:
            record = FaultRecord(**json.loads(path.read_text(encoding="utf-8")))
            return record if 0 <= self._clock() - record.last_time < KEPT_S else None
        except (OSError, ValueError, TypeError):
            return None

    def clear(self) -> int:
        """Forget everything; how many records there were."""
        files = list(self._folder.glob("*.json")) if self._folder.is_dir() else []
        for file in files:
            file.unlink(missing_ok=True)
        return len(files)

    def _path(self, plugin: Identity) -> Path:
        # Names of plugins may hold any character, so a file cannot be called after them.
        text = "\n".join(_identity(plugin)[:3])
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _identity(plugin: Identity) -> tuple[str, str, str, str]:
    return (plugin.kind, plugin.distribution, plugin.name, plugin.version)
