"""The way of requests from an event loop to the engine: to one that rests, all that come at once go together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from llmkit.errors import EngineError
from llmkit.requests.message import EngineRequest

QUIET_TURNS = 3
"""Turns of the event loop without another request, after which nobody seems to bring one: behind the first look sockets
are read, behind the second the tasks run that this has woken, and the third finds what they have brought."""

LONGEST_S = 0.02
"""Longest that a request is held while every turn brings more."""


class HandOver:
    """An engine that rests begins its first step with what it has. Handed over one by one, that would be the first of
    many requests that arrive together; all others would wait for the end of a step that is nearly empty. So those for
    a resting engine are held while the event loop still has work that brings more of them: not for any time, only as
    long as it is busy with that. One that comes alone is held for QUIET_TURNS turns, in which nothing happens.

    add: as of AsyncEngineClient. failed: told the error if requests that were held cannot be handed over any more.
    clock: in seconds.
    """

    def __init__(
        self,
        add: Callable[[Sequence[EngineRequest]], None],
        failed: Callable[[EngineError], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._add = add
        self._failed = failed
        self._clock = clock
        self._held: dict[str, EngineRequest] = {}
        self._num_taken = 0
        self._turn: asyncio.Handle | None = None

    def __len__(self) -> int:
        """Requests that are held."""
        return len(self._held)

    def take(self, request: EngineRequest, *, resting: bool) -> None:
        """Hand a request over, or hold it for some turns. resting: the engine has nothing but what is held. Raises what
        `add` does. To be called where the event loop runs."""
        if not resting:
            self._add([request])
            return
        self._held[request.request_id] = request
        self._num_taken += 1
        if self._turn is None:
            self._next_turn(self._num_taken, 0, self._clock() + LONGEST_S)

    def withdraw(self, request_ids: Iterable[str]) -> list[str]:
        """Forget those of the requests that are held; returns the others, which the engine has."""
        return [request_id for request_id in request_ids if self._held.pop(request_id, None) is None]

    def flush(self) -> None:
        """Hold nothing any longer."""
        held, self._held = self._held, {}
        if not held:
            return
        try:
            self._add(list(held.values()))
        except EngineError as error:
            self._failed(error)

    def _next_turn(self, num_seen: int, num_quiet: int, deadline: float) -> None:
        self._turn = asyncio.get_running_loop().call_soon(self._look, num_seen, num_quiet, deadline)

    def _look(self, num_seen: int, num_quiet: int, deadline: float) -> None:
        self._turn = None
        if not self._held:
            return
        num_quiet = num_quiet + 1 if self._num_taken == num_seen else 0
        if num_quiet < QUIET_TURNS and self._clock() < deadline:
            self._next_turn(self._num_taken, num_quiet, deadline)
            return
        self.flush()
