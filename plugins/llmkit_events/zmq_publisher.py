"""A thread that sends KV events: PUB for everybody, ROUTER for those who have missed some.

Frames of a published message: topic, sequence number (8 bytes, big-endian), payload. The payload is the MessagePack
array [time, [event, ...], data-parallel rank], each event a map with the key `type`, hashes as 64-bit integers. Who
asks the ROUTER sends (empty, first sequence number) and gets (empty, sequence number, payload) for every message from
there on that is still kept, then sequence number -1.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec
import zmq

from llmkit.kv_cache.events import KVEvent, with_short_hashes

if TYPE_CHECKING:
    from llmkit_events.kv_events_zmq import ZmqEventOptions

logger = logging.getLogger("llmkit.events")

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

LINGER_MS = 1000
"""How long a closed publisher goes on sending what its subscribers have not taken."""

CLOSE_WAIT_S = 3.0
_RANK = 0


class ZmqPublisher:
    """`publish` only queues, and never waits: when the queue is full, events are dropped and a sequence number is left
    out, which tells subscribers that they have missed something.

    Raises zmq.ZMQError if an endpoint cannot be bound.
    """

    def __init__(self, options: ZmqEventOptions) -> None:
        self._options = options
        self._topic = options.topic.encode()
        self._queue: deque[KVEvent] = deque()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=options.buffer_steps)
        self._next = 0
        self._num_dropped = 0
        self._num_dropped_told = 0
        self._encode = msgspec.msgpack.Encoder().encode
        self._closing = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._wakened.setblocking(False)
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._pub = self._socket(zmq.PUB, options.endpoint, options.hwm)
            if options.replay_endpoint is not None:
                self._replay = self._socket(zmq.ROUTER, options.replay_endpoint, 0)
        except BaseException:
            self._release()
            raise
        self.endpoint: str = _bound_to(self._pub)
        self.replay_endpoint = None if self._replay is None else _bound_to(self._replay)
        self._thread = threading.Thread(target=self._run, name="llmkit-kv-events", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Events that the queue had no room for."""
        return self._num_dropped

    def publish(self, event: KVEvent) -> None:
        """Send `event` soon. Never blocks."""
        if len(self._queue) >= self._options.max_queue_size:
            self._num_dropped += 1
            return
        self._queue.append(event)
        if len(self._queue) == 1:
            self._wake()

    def close(self) -> None:
        """Send what is queued and stop. May be called twice."""
        self._closing = True
        self._wake()
        self._thread.join(CLOSE_WAIT_S)

    def _wake(self) -> None:
        # A full buffer means that it will wake anyway; a closed socket, that there is nobody left to wake.
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def _socket(self, kind: int, endpoint: str, hwm: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.set_hwm(hwm)
        made.setsockopt(zmq.LINGER, LINGER_MS)
        if "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
            made.bind(endpoint)
        else:
            made.connect(endpoint)
        return made

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakened.fileno(), zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while not self._closing:
                ready = dict(poller.poll())
                with contextlib.suppress(BlockingIOError):
                    self._wakened.recv(4096)
                self._send_queued()
                if self._replay is not None and self._replay in ready:
                    self._answer(self._replay)
            self._send_queued()
        except zmq.ZMQError as error:
            logger.error("KV events are not published any more: %s", error)
        finally:
            self._release()

    def _send_queued(self) -> None:
        events: list[KVEvent] = []
        while self._queue:
            events.append(with_short_hashes(self._queue.popleft()))
        dropped = self._num_dropped
        if dropped != self._num_dropped_told:
            logger.warning(
                "KV events are dropped, %d so far: the queue of %d is full.", dropped, self._options.max_queue_size
            )
            self._num_dropped_told = dropped
            self._next += 1
        if not events:
            return
        payload = self._encode([time.time(), events, _RANK])
        number = self._next
        self._next += 1
        self._sent.append((number, payload))
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        frames = replay.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            logger.warning("A request for past KV events was not understood.")
            return
        client, first = frames[0], int.from_bytes(frames[2], "big")
        for number, payload in list(self._sent):
            if number >= first:
                replay.send_multipart((client, b"", number.to_bytes(8, "big"), payload))
        replay.send_multipart((client, b"", END_OF_REPLAY, b""))

    def _release(self) -> None:
        self._context.destroy(linger=LINGER_MS)
        self._waker.close()
        self._wakened.close()


def _bound_to(made: zmq.Socket[bytes]) -> str:
    endpoint = made.getsockopt(zmq.LAST_ENDPOINT)
    return endpoint.decode().rstrip("\0") if isinstance(endpoint, bytes) else str(endpoint)
