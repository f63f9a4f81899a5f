"""Wakes a thread that waits in a poll."""

from __future__ import annotations

import os
from contextlib import suppress


class Wake:
    """A pipe to oneself. `set` from any thread, also after `close`; the rest from the thread that polls."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def fileno(self) -> int:
        """Readable once somebody has called `set`."""
        return self._read

    def set(self) -> None:
        """Wake the thread, or let it not fall asleep."""
        with suppress(BlockingIOError):  # it is full of reasons to wake up
            os.write(self._write, b"\0")

    def clear(self) -> None:
        """Forget all reasons so far; to be followed by a look at what they were."""
        with suppress(BlockingIOError):
            while os.read(self._read, 4096):
                pass

    def __del__(self) -> None:
        # Not before nobody has it any more: a number that was closed may be a stranger's when somebody writes to it.
        os.close(self._read)
        os.close(self._write)
