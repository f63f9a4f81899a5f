"""Threads that go on when what has started them is gone."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

PATIENCE_S = 2.0
"""For a thread that has been told to end, in seconds."""


def left_threads(use: Callable[[], None]) -> list[str]:
    """Names of the threads that a second `use` leaves behind. What the first one starts for the whole process, such as
    the event loop of a library, may stay."""
    use()
    before = set(threading.enumerate())
    use()
    gc.collect()
    deadline = time.monotonic() + PATIENCE_S
    new = [thread for thread in threading.enumerate() if thread not in before]
    for thread in new:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread.name for thread in new if thread.is_alive()]
