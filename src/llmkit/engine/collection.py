"""Python's garbage collector while an engine starts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_settled: set[str] = set()


@contextmanager
def collection_paused(stage: str) -> Iterator[None]:
    """No garbage collection while this lasts; where the collector is off already, nothing happens.

    A start imports and builds about a million objects that live as long as the process, and the collector would walk
    over them again and again. Those of the first `stage` of its name in a process that goes well are taken out of later
    collections too: each of those would otherwise hold up a step. What was garbage before is collected first, so that
    none of it is kept.
    """
    if not gc.isenabled():
        yield
        return
    first = stage not in _settled
    if first:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    if first:
        _settled.add(stage)
        gc.freeze()
