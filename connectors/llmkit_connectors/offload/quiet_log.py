"""Warnings about something that can happen thousands of times."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable


class QuietLog:
    """Passes a warning on at most once in `interval_s` seconds and says how many were kept back since."""

    def __init__(
        self, logger: logging.Logger, interval_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._next = float("-inf")
        self._kept_back = 0

    def warning(self, message: str) -> None:
        """Log `message`, or count it."""
        with self._lock:
            now = self._clock()
            if now < self._next:
                self._kept_back += 1
                return
            self._next = now + self._interval_s
            more, self._kept_back = self._kept_back, 0
        self._logger.warning("%s%s", message, f" ({more} more such warnings before this one)" if more else "")
