"""Responses kept in memory, for those who ask for them again or go on with them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import msgspec

from llmkit_server.errors import ApiError
from llmkit_server.protocol.responses import Item, ResponseObject


@dataclass
class StoredResponse:
    """A response and what it was made of. owner: whose it is; others are not told that it exists.

    items: all that went before it, and its input. events: those of a background run that was asked for as a stream.
    task: the background run, while it goes on; cancel: ends it.
    """

    response: ResponseObject
    items: list[Item]
    owner: str | None = None
    events: list[bytes] | None = None
    task: asyncio.Task[None] | None = None
    cancel: Callable[[], None] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    num_bytes: int = 0

    @property
    def is_running(self) -> bool:
        return self.task is not None

    @property
    def conversation(self) -> list[Item]:
        """What the next response begins with."""
        return [*self.items, *self.response.output]

    def notify(self) -> None:
        """Something is new; wakes `stream`."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def stream(self, after: int) -> AsyncGenerator[bytes]:
        """The events with numbers above `after`, those to come included."""
        number = after + 1
        while True:
            changed, events = self.changed, self.events or []
            while number < len(events):
                yield events[number]
                number += 1
            if not self.is_running:
                return
            await changed.wait()

    def measure(self) -> None:
        """Items shared with earlier responses count for each of them: the bound holds whichever are forgotten first."""
        self.num_bytes = len(msgspec.json.encode((self.response, self.items))) + sum(map(len, self.events or ()))


class ResponseStore:
    """At most so many responses of so many bytes together; the one that was longest not asked for goes first. Those
    that still run stay."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, stored: StoredResponse) -> None:
        """Keep a response."""
        self._stored[stored.response.id] = stored
        self.recount(stored)

    def recount(self, stored: StoredResponse) -> None:
        """A response has changed, or its run has ended; one that was removed meanwhile stays so."""
        if stored.response.id not in self._stored:
            return
        self.num_bytes -= stored.num_bytes
        stored.measure()
        self.num_bytes += stored.num_bytes
        for old in [one for one in self._stored.values() if not one.is_running]:
            if len(self._stored) <= self._max_responses and self.num_bytes <= self._max_bytes:
                break
            self.remove(old)

    def find(self, response_id: str, owner: str | None, param: str = "response_id") -> StoredResponse:
        """Raises ApiError 404 if it was never there, is another's, or was forgotten."""
        stored = self._stored.get(response_id)
        if stored is None or stored.owner != owner:
            raise ApiError(
                404,
                f"There is no response {response_id[:128]!r}: it was not stored, or has made room for newer ones.",
                param=param,
            )
        self._stored.move_to_end(response_id)
        return stored

    def remove(self, stored: StoredResponse) -> None:
        if self._stored.pop(stored.response.id, None) is not None:
            self.num_bytes -= stored.num_bytes
