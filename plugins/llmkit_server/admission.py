"""How much the server takes on: a bound on waiting requests, and a rate for each client."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from llmkit.errors import InvalidRequestError
from llmkit_server.errors import ApiError
from llmkit_server.limits import MAX_CLIENTS


class Admission:
    """Counts sequences that were taken in and have not ended. capacity: those that run and those that may wait."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_sequences = 0
        self.num_requests = 0
        self.num_refused = 0

    @contextmanager
    def enter(self, num_sequences: int) -> Iterator[None]:
        """Room for `num_sequences` inputs while they run. Raises as `take` does."""
        self.take(num_sequences)
        try:
            yield
        finally:
            self.give_back(num_sequences)

    def take(self, num_prompts: int, n: int = 1) -> None:
        """Room for `n` answers to each of `num_prompts`; `give_back` of their product must follow. Raises
        InvalidRequestError, naming what asks for more, if that is more than can ever be taken, ApiError 429 if the
        queue is full."""
        num_sequences = num_prompts * n
        if num_sequences > self.capacity:
            raise InvalidRequestError(
                f"The request asks for {num_sequences} answers (prompts: {num_prompts}, n: {n}); this server takes "
                f"{self.capacity} at a time (max_num_seqs and max_queue together).",
                param="prompt" if num_prompts > self.capacity or n == 1 else "n",
            )
        if self.num_sequences + num_sequences > self.capacity:
            self.num_refused += 1
            raise ApiError(
                429,
                "The server has as many requests waiting as it takes; try again soon.",
                headers={"retry-after": "1"},
            )
        self.num_sequences += num_sequences
        self.num_requests += 1

    def give_back(self, num_sequences: int) -> None:
        self.num_sequences -= num_sequences
        self.num_requests -= 1


@dataclass(slots=True)
class _Bucket:
    tokens: float
    updated: float


class RateLimiter:
    """A token bucket for each client, which holds a minute's requests. Clients long unseen are forgotten."""

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._size = max(1.0, per_minute)
        self._per_second = per_minute / 60
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def seconds_to_wait(self, client: str) -> float:
        """0, and the request is counted; or how long until `client` may send the next one."""
        now = self._clock()
        bucket = self._buckets.get(client)
        if bucket is None:
            bucket = self._buckets[client] = _Bucket(self._size, now)
            if len(self._buckets) > MAX_CLIENTS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(client)
        bucket.tokens = min(self._size, bucket.tokens + (now - bucket.updated) * self._per_second)
        bucket.updated = now
        if bucket.tokens >= 1:
            bucket.tokens -= 1
            return 0.0
        return (1 - bucket.tokens) / self._per_second

    def check(self, client: str) -> None:
        """Raises ApiError 429, with the seconds to wait, for a request too many."""
        seconds = self.seconds_to_wait(client)
        if seconds > 0:
            raise ApiError(
                429,
                f"Too many requests: at most {self._per_second * 60:g} a minute.",
                headers={"retry-after": str(math.ceil(seconds))},
            )
