"""A check that does not end fails, and says where it was."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

AGAIN_S = 1.0
"""Whoever catches the failure and goes on meets the next one so much later."""


class RanOutOfTime(pytest.fail.Exception):  # type: ignore[misc, name-defined]
    """Like other failures of pytest no Exception: a plugin's own `except Exception` does not stop it."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Fail with the place that was reached if the block takes longer; 0: no limit.

    Python code is interrupted, and waiting in it; code of a library is not before it returns. There is no limit where
    there is no SIGALRM, nor in another thread than the main one.

    Raises RanOutOfTime.
    """
    if not seconds or not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_signal: int, frame: FrameType | None) -> None:
        place = f" It was in {_described(frame)}." if frame else ""
        raise RanOutOfTime(f"it has not ended after {seconds:g} seconds (--llmkit-timeout).{place}")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _described(frame: FrameType) -> str:
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"
