"""Names for the parts of a step, so that a profile can say where its time went. Free while nobody profiles."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

PREFIX = "llmkit: "

Recorder = Callable[[str], AbstractContextManager[object]]

_nothing = nullcontext()
_recorder: Recorder | None = None


def part(name: str) -> AbstractContextManager[object]:
    """What happens within belongs to the part `name` of a step. Parts may lie within one another."""
    return _nothing if _recorder is None else _recorder(PREFIX + name)


def record_parts(recorder: Recorder | None) -> None:
    """Have `recorder` called with the prefixed name of every part, in this process; None: no longer."""
    global _recorder
    _recorder = recorder
