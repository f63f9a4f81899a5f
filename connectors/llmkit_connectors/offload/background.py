"""Threads that do one thing after another."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

logger = logging.getLogger("llmkit.connectors.offload")

Task = Callable[[], None]


class Background:
    """A queue of tasks and the threads that carry them out, first in, first out.

    The threads are daemons: a storage that does not answer cannot keep the process from ending. What a task raises is
    logged; tasks that have to report their end must do so whatever happens to them.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._tasks: deque[Task] = deque()
        self._changed = threading.Condition()
        self._num_busy = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"llmkit-{name}-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task) -> None:
        """Carry out `task` some time; nothing happens after `close`."""
        with self._changed:
            if not self._closed:
                self._tasks.append(task)
                self._changed.notify()

    def close(self, seconds: float) -> int:
        """Take no more tasks, and wait for those that are there, `seconds` at the most; how many were dropped then.
        Those that have begun are not broken off. May be called twice."""
        deadline = time.monotonic() + seconds
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._tasks and not self._num_busy, timeout=seconds)
            dropped = len(self._tasks)
            self._tasks.clear()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return dropped

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._closed)
                if not self._tasks:
                    return
                task = self._tasks.popleft()
                self._num_busy += 1
            try:
                task()
            except Exception:
                logger.exception("a transfer of KV blocks ended unexpectedly")
            finally:
                del task
                with self._changed:
                    self._num_busy -= 1
                    self._changed.notify_all()
