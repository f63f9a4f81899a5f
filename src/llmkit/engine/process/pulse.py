"""Signs of life: what the engine process is at and since when, sent by a thread of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

import zmq

from llmkit.engine.process.messages import Heartbeat, encode

if TYPE_CHECKING:
    from collections.abc import Iterator


class Pulse:
    """What the main thread is doing. Written by that thread, read by the one that sends."""

    def __init__(self) -> None:
        self._now: tuple[str, float, bool] = ("", 0.0, True)

    @contextmanager
    def doing(self, activity: str, *, bounded: bool = True) -> Iterator[None]:
        """The block is one piece of work, whose age the heartbeats tell. bounded: see `Heartbeat`."""
        self._now = (activity, monotonic(), bounded)
        try:
            yield
        finally:
            self._now = ("", 0.0, True)

    def beat(self) -> Heartbeat:
        """The state of this moment."""
        activity, since, bounded = self._now
        return Heartbeat(activity, monotonic() - since if activity else 0.0, bounded)


class HeartbeatThread:
    """Sends a heartbeat at once and every `interval_s` seconds to `endpoint`, and looks whether the parent still lives.

    orphaned: called once, in this thread, when it does not. ZMQ sockets belong to one thread: it has one of its own.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        pulse: Pulse,
        interval_s: float,
        parent_pid: int,
        orphaned: Callable[[], None],
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._pulse = pulse
        self._interval_s = interval_s
        self._parent_pid = parent_pid
        self._orphaned = orphaned
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llmkit-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close its socket."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._endpoint)
        told = False
        try:
            socket.send(encode(self._pulse.beat()))
            while not self._stop.wait(self._interval_s):
                socket.send(encode(self._pulse.beat()))
                if not told and os.getppid() != self._parent_pid:
                    told = True
                    self._orphaned()
        finally:
            socket.close()
