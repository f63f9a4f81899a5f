"""Freeing grammars beside the step loop: one of a hundred megabytes takes a tenth of a second."""

from __future__ import annotations

import logging
import threading
import weakref
from queue import SimpleQueue
from typing import TYPE_CHECKING

from llmkit.grammars.short_turns import step_back

if TYPE_CHECKING:
    from llmkit.grammars.cache import ReadyGrammar
    from llmkit.hookspecs.structured import CompiledGrammar

logger = logging.getLogger("llmkit.grammars")

NICE = 10


class Disposal:
    """A thread that lets go of compiled grammars when nothing uses them any more, wherever the last one that did was:
    as a rule in the step loop, which drops a sequence, or in a loader, which adds to the full cache."""

    def __init__(self) -> None:
        self._unused: SimpleQueue[CompiledGrammar | None] = SimpleQueue()  # whose `put` may be called in a finalizer
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, ready: ReadyGrammar) -> None:
        """Free what is compiled in `ready` in the thread, once that is gone."""
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="llmkit-grammar-disposal", daemon=True)
                self._thread.start()
        weakref.finalize(ready, self._put, ready.compiled).atexit = False

    def close(self) -> None:
        """End the thread, when it has freed what is unused by now. Later ones are freed where they are dropped. May be
        called twice."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._unused.put(None)
            thread.join()

    def _put(self, compiled: CompiledGrammar) -> None:
        if not self._closed:
            self._unused.put(compiled)

    def _run(self) -> None:
        step_back(threading.get_native_id(), NICE)
        while (compiled := self._unused.get()) is not None:
            try:
                compiled.release()
            except BaseException as error:  # a panic in Rust is no Exception
                logger.warning("a grammar could not be released", exc_info=error)
            del compiled
