"""Utility calls that wait for their answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from llmkit.engine.process import messages
from llmkit.engine.process.messages import Call
from llmkit.errors import EngineError

READ_ONLY = frozenset({"stats", "kv_map", "is_sleeping", "plugin_timings", "recent_steps", "selections", "snapshot"})
"""Utilities that change nothing: when the process has died over one, the next process is asked again."""


@dataclass
class _Pending:
    call: Call
    future: Future[Any]
    sent: bool = False


class Calls:
    """Used by the supervisor's thread; the futures belong to others, who may cancel them."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._asleep: list[Call] = []

    @property
    def any_sent(self) -> bool:
        """Whether the process owes an answer."""
        return any(pending.sent for pending in self._pending.values())

    def add(self, method: str, arguments: bytes, future: Future[Any]) -> None:
        """A new call, not sent yet."""
        call = Call(next(self._numbers), method, arguments)
        self._pending[call.number] = _Pending(call, future)

    def take_unsent(self) -> Iterator[Call]:
        """The calls that the process has not been told of; they are told now."""
        for pending in self._pending.values():
            if not pending.sent:
                pending.sent = True
                yield pending.call

    def answer(self, number: int, value: bytes, *, failed: bool) -> None:
        """What the process has answered."""
        pending = self._pending.pop(number, None)
        if pending is None:
            return
        with suppress(InvalidStateError):  # cancelled
            if failed:
                pending.future.set_exception(messages.loaded_error(value))
            else:
                self._note_sleep(pending.call)
                pending.future.set_result(messages.loaded(value))

    def _note_sleep(self, call: Call) -> None:
        """Which calls make a new process sleep as this one does."""
        if call.method == "sleep":
            self._asleep = [call]
        elif call.method == "wake_up" and self._asleep:
            wakes_all = messages.loaded(call.arguments) in ((), (None,))
            self._asleep = [] if wakes_all else [*self._asleep, call]

    def process_started(self) -> None:
        """A new process is ready. If the one before slept, somebody else may be using its memory: it sleeps, too."""
        pending, self._pending = self._pending, {}
        repeated, self._asleep = self._asleep, []
        for call in repeated:
            self.add(call.method, call.arguments, Future())
        self._pending |= pending

    def process_died(self, cause: Exception) -> None:
        """The process died with calls unanswered: those that only read wait for the next one, the others fail."""
        for number, pending in list(self._pending.items()):
            if pending.sent and pending.call.method not in READ_ONLY:
                del self._pending[number]
                message = f"The engine process died before it had answered {pending.call.method}: {cause}"
                _fail(pending.future, EngineError(message))
            pending.sent = False

    def fail_all(self, error: Exception) -> None:
        """Nobody answers any more."""
        pending, self._pending = self._pending, {}
        for one in pending.values():
            _fail(one.future, error)


def _fail(future: Future[Any], error: Exception) -> None:
    with suppress(InvalidStateError):  # cancelled
        future.set_exception(error)
