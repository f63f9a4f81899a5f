"""When an engine without requests takes its next step for the connector."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import Protocol

logger = logging.getLogger("llmkit.engine")

FIRST_WAIT_S = 0.002
LONGEST_WAIT_S = 1.0


class TransferringCore(Protocol):
    """The part of EngineCore that is used here."""

    def has_transfers(self) -> bool: ...
    def step_transfers(self) -> bool: ...


class IdleTransfers:
    """For the loop of an engine that waits for requests: blocks that a connector still moves are held until a step
    brings its report, and what it could not store at once begins with a step. No step waits for a transfer, as requests
    may come: the loop does, for `seconds_left`, and calls `run` then.

    As long as steps bring something they follow each other at once. Otherwise the next one waits about as long as
    nothing has happened by then, LONGEST_WAIT_S at most: a transfer without end costs next to nothing. `clock` gives
    seconds and never goes back.
    """

    def __init__(self, core: TransferringCore, clock: Callable[[], float] = monotonic) -> None:
        self._core = core
        self._clock = clock
        self._due: float | None = None
        self._wait_s = 0.0

    def seconds_left(self) -> float | None:
        """Until the next step is due; None if there is nothing to take one for."""
        if not self._core.has_transfers():
            self.busy()
            return None
        return 0.0 if self._due is None else max(0.0, self._due - self._clock())

    def run(self) -> None:
        """Take a step, if one is due. What it raises is logged, and counts as a step that has brought nothing."""
        if self.seconds_left() != 0.0:
            return
        brought = False
        try:
            brought = self._core.step_transfers()
        except Exception:
            logger.exception("a step for the connector was broken off")
        self._wait_s = 0.0 if brought else min(LONGEST_WAIT_S, max(FIRST_WAIT_S, 2 * self._wait_s))
        self._due = self._clock() + self._wait_s

    def busy(self) -> None:
        """There are requests again, whose steps bring the reports along."""
        self._due, self._wait_s = None, 0.0
