"""How much may be spent on judging a constraint where others wait.

The door judges what is small in length, but a few hundred characters may multiply to seconds of work, and those who
wait for their tokens share the interpreter with the door. So whatever reads a constraint says with `spend` that it has
done a piece of work. Where a limit holds and is exceeded, TooMuchEffort ends the reading, and the constraint is judged
where it is compiled, in a process that has its own limits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import thread_time

DOOR_S = 0.02
"""Processor time for judging one constraint at the door, by all engines together, in seconds."""


class TooMuchEffort(Exception):
    """The limit of an Effort is exceeded. To be let through by whoever reads a constraint."""


class _Current(threading.local):
    end: float | None = None


_current = _Current()


class Effort:
    """At most `seconds` of processor time, over all uses of `limited` together."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Within it, `spend` raises TooMuchEffort in this thread when nothing is left."""
        before = _current.end
        _current.end = end = thread_time() + self._left
        try:
            yield
        finally:
            self._left = end - thread_time()
            _current.end = before


def spend() -> None:
    """To be called for every piece of work, of microseconds each, whose number may grow with more than the length of
    the constraint. Raises TooMuchEffort where a limit holds and is exceeded."""
    if _current.end is not None and thread_time() > _current.end:
        raise TooMuchEffort
