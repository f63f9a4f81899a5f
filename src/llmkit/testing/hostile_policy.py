"""A scheduling policy that breaks its contract in every way it can think of."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar, cast

from llmkit.hookspecs.scheduler import Load, RequestView, SchedulerPolicy

T = TypeVar("T")


class HostilePolicy(SchedulerPolicy):
    """Raises, forgets requests, returns strangers, nonsense and numbers out of range, at random.

    `honesty`: share of the calls that it answers as it should.
    """

    def __init__(self, seed: int = 0, honesty: float = 0.3) -> None:
        self._random = random.Random(seed)
        self._honesty = honesty
        self._waiting: list[RequestView] = []
        self._seen: list[RequestView] = []

    def add(self, request: RequestView) -> None:
        self._seen.append(request)
        if self._honest():
            self._waiting.append(request)
        self._maybe_raise()

    def peek(self) -> RequestView | None:
        return self._answer(self._waiting[0] if self._waiting else None)

    def pop(self) -> RequestView:
        self._maybe_raise()
        if self._honest():
            return self._waiting.pop(0)
        return self._answer(self._seen[0])

    def remove(self, request: RequestView) -> None:
        self._maybe_raise()
        if request in self._waiting:
            self._waiting.remove(request)

    def requeue(self, request: RequestView) -> None:
        self._maybe_raise()
        self._waiting.insert(0, request)

    def __len__(self) -> int:
        return self._random.choice([-1, 0, 10**9])

    def victim(self, running: Sequence[RequestView], needing: RequestView) -> RequestView | None:
        return self._answer(self._random.choice([needing, running[0], running[-1]]))

    def admit(self, request: RequestView, load: Load) -> bool:  # noqa: ARG002
        return self._answer(False)

    def chunk(self, request: RequestView, offered: int) -> int:  # noqa: ARG002
        self._maybe_raise()
        return self._random.choice([-5, 0, 1, offered, offered + 1, 10**12, "many", None])  # type: ignore[return-value]

    def served(
        self, requests: Sequence[RequestView], num_prompt_tokens: Sequence[int], num_output_tokens: Sequence[int]
    ) -> None:
        for rows in (requests, num_prompt_tokens, num_output_tokens):
            cast("list[Any]", rows).clear()
        self._maybe_raise()

    def _honest(self) -> bool:
        return self._random.random() < self._honesty

    def _maybe_raise(self) -> None:
        if self._random.random() < 0.2:
            raise RuntimeError("a policy that fails")

    def _answer(self, right: T) -> T:
        """`right`, or something else that may have been a request once."""
        self._maybe_raise()
        if self._honest():
            return right
        wrong: list[Any] = [None, 7, [], object(), *self._seen]
        return cast("T", self._random.choice(wrong))
