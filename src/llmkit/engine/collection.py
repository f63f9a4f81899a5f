"""Python's garbage collector while an engine starts."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_frozen = False
_owned = False


@contextmanager
def collection_paused() -> Iterator[None]:
    """No garbage collection while this lasts; where the collector is off already, nothing happens.

    A start imports some hundred thousand objects, and the collector would walk over them again and again. Not for the
    reading of weights: garbage that holds some of them would add to the peak of memory.
    """
    if not gc.isenabled():
        yield
        return
    if _owned and not _frozen:
        gc.collect()  # so that `freeze_imports` keeps nobody's garbage
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def own_process() -> None:
    """Say that this process is llmkit's: all that is there when an engine is built may stay as long as the process."""
    global _owned
    _owned = True


def freeze_imports() -> None:
    """Take what there is now out of later collections, the first time in a process only, and only if it is llmkit's:
    where an application embeds an engine, its own objects must stay collectable.

    To be called when the large libraries are there and nothing of an engine is yet: an engine's own objects must stay
    collectable, or its weights would outlive it.
    """
    global _frozen
    if _owned and not _frozen and not gc.isenabled():
        _frozen = True
        gc.freeze()
        atexit.register(gc.unfreeze)  # libraries that count what is left of theirs would report all of it
