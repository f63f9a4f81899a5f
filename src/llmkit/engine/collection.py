"""Python's garbage collector while an engine starts, and what it leaves alone while one runs.

A full collection walks over every object there is: some hundred thousand of libraries, which takes 100 to 300 ms, in
the middle of a step. So what is there before an engine is built is taken out of collections ("frozen") until it ends.
The engine's own objects and what comes and goes with requests are collected as ever; the collector itself is neither
turned off nor tuned.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_frozen = False  # by `freeze_imports`
_owned = False
_engine_before = False

_OF_PYTHON = 1000
"""Frozen objects that may be the interpreter's own: Python 3.12 freezes 375 before anything runs."""


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
    if not _anything_frozen():
        gc.collect()  # so that nobody's garbage is kept by what is frozen later
    gc.disable()
    try:
        yield
    finally:
        if not _anything_frozen():  # what others have frozen must stay so
            gc.freeze()
            gc.unfreeze()  # into the oldest generation, and no object was looked at
        gc.enable()


class Aside:
    """What collections leave alone for an engine's sake, until `end` or until this object is gone."""

    def __init__(self) -> None:
        self._kept = False

    def keep(self) -> None:
        """All that there is now."""
        self._kept = True
        gc.freeze()
        _unfreeze_at_exit()

    def end(self) -> None:
        """Let collections look at everything again. May be called twice."""
        if self._kept:
            self._kept = False
            gc.unfreeze()

    def __del__(self) -> None:
        self.end()


@contextmanager
def set_aside() -> Iterator[Aside]:
    """Have collections look at nothing that is there now, such as libraries and an application's objects, until the
    `Aside` ends; if this is left with an exception, it has ended.

    For an engine, from before its weights are read. That needs collections, and ends with one: garbage that holds some
    weights would add to the peak of memory. Does nothing where something is frozen already, which could not be told
    apart.
    """
    global _engine_before
    aside = Aside()
    if not _anything_frozen():
        if _engine_before:
            gc.collect()  # its weights may be waiting for that
        _engine_before = True
        aside.keep()
    try:
        yield aside
    except BaseException:
        aside.end()
        raise


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
        _unfreeze_at_exit()


def freeze_later_imports() -> None:
    """`freeze_imports` for libraries that came after it, before any weight is read. What is garbage by now is not
    kept."""
    if _frozen:
        gc.collect()
        gc.freeze()


def _unfreeze_at_exit() -> None:
    """Libraries that count what is left of theirs would else report all of it."""
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)


def _anything_frozen() -> bool:
    return gc.get_freeze_count() > _OF_PYTHON
