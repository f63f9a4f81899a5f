"""Long work beside the step loop: turns at the interpreter, and a share of the processors."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SHORT_S = 1e-4

_lock = threading.Lock()
_num_inside = 0
_before = 0.0


@contextmanager
def short_turns() -> Iterator[None]:
    """While this lasts, a thread that wants the interpreter gets it after SHORT_S seconds instead of five milliseconds.

    A step of the engine lets go of the interpreter at every kernel that it launches, and has to wait for it afterwards
    if another thread runs Python meanwhile. A hundred waits of five milliseconds are half a second, in every step for
    as long as a library is imported. May be entered by several threads, and again within itself.
    """
    global _num_inside, _before
    with _lock:
        if _num_inside == 0:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(_before, SHORT_S))
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if _num_inside == 0:
                sys.setswitchinterval(_before)


def step_back(native_id: int | None, niceness: int) -> None:
    """Let other threads come before the one of that id of the system's (`Thread.native_id`). Only where threads have
    niceness of their own; it cannot be taken back."""
    if sys.platform == "linux" and native_id is not None:
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, native_id, max(niceness, os.getpriority(os.PRIO_PROCESS, native_id)))
