"""Sleep: the engine takes no steps, and gives back memory of the device that it can get again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from llmkit.errors import EngineError, InvalidRequestError, shown

if TYPE_CHECKING:
    from llmkit.hookspecs.executor import Executor
    from llmkit.scheduling.scheduler import Scheduler

PARTS = ("weights", "kv_cache", "scheduling")
"""What may sleep, and the tags by which it is woken."""


class Sleeper:
    """Level 0: no steps are taken; everything stays where it is. Level 1: the KV cache is given back, too, and the
    weights leave the device unless it is the host. Level 2: the weights are given back everywhere.

    level: None while awake. parts: those of PARTS that sleep.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self.level: int | None = None
        self.parts: set[str] = set()

    def sleep(self, level: int) -> None:
        """Sleep so deeply at least; no step may be under way. Running requests wait, from level 1 on without what was
        computed of them. Raises InvalidRequestError, or EngineError if executor or connector cannot."""
        if isinstance(level, bool) or level not in (0, 1, 2):
            raise InvalidRequestError(f"level must be 0, 1 or 2, got {shown(level)}.", param="level")
        if self.level is not None and level <= self.level:
            return
        if level > 0:
            if self._scheduler.transfers.connector is not None:
                raise EngineError("an engine with a connector cannot give back its KV cache; level 0 pauses it.")
            self._scheduler.vacate()
            self._executor.sleep(level)
            self.parts |= {"weights", "kv_cache"}
        self.parts.add("scheduling")
        self.level = level

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Wake these parts, all by default; steps go on once none sleeps. The weights come before the KV cache. Raises
        InvalidRequestError for an unknown tag, and what the executor raises; the part then still sleeps."""
        wanted = list(PARTS if tags is None else [tags] if isinstance(tags, str) else tags)
        unknown = next((tag for tag in wanted if tag not in PARTS), None)
        if unknown is not None:
            raise InvalidRequestError(f"tags may be {', '.join(PARTS)}; got {shown(unknown)}.", param="tags")
        if "kv_cache" in wanted and "weights" in self.parts and "weights" not in wanted:
            raise EngineError("the weights must be awake before the KV cache: wake them first, or both.")
        for part in ("weights", "kv_cache"):
            if part in wanted and part in self.parts:
                self._executor.wake_up(part)
                self.parts.discard(part)
        if not self.parts & {"weights", "kv_cache"}:
            self.parts.clear()
            self.level = None
