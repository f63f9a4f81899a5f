"""Python's garbage collector while an engine starts."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_frozen = False
_owned = False
_engine_before = False


@contextmanager
def collection_paused() -> Iterator[None]:
    """No garbage collection while this lasts; where the collector is off already, nothing happens. What there is at the
    end counts as old: collections of young objects would else begin with all that was imported.

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
        if not gc.get_freeze_count():  # what others have frozen must stay so
            gc.freeze()
            gc.unfreeze()  # into the oldest generation, and no object was looked at
        gc.enable()


@contextmanager
def set_aside() -> Iterator[None]:
    """While this lasts, collections look at nothing that is there now, such as libraries and an application's objects.

    For the reading of weights, which needs collections, and ends with one: garbage that holds some weights would add to
    the peak of memory. Does nothing where something is frozen already, which could not be told apart.
    """
    global _engine_before
    if gc.get_freeze_count():
        yield
        return
    if _engine_before:
        gc.collect()  # its weights may be waiting for that
    _engine_before = True
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


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


def freeze_later_imports() -> None:
    """`freeze_imports` for libraries that came after it, before any weight is read. What is garbage by now is not
    kept."""
    if _frozen:
        gc.collect()
        gc.freeze()
