"""Histograms with fixed bounds, as Prometheus knows them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
"""Bounds of the time to the first token, in seconds. These and the following are those that dashboards expect."""

TOKEN_INTERVAL_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
"""Bounds of the time between two tokens, in seconds."""

REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
"""Bounds of a request's phases, in seconds."""

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds of the tokens of a step."""

NUM_ANSWERS = (1, 2, 5, 10, 20)
"""Bounds of the number of answers that a request asks for."""


def token_bounds(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, … up to `limit` tokens."""
    bounds: list[float] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > limit:
                return tuple(bounds)
            bounds.append(step * scale)
        scale *= 10


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """A histogram at one moment. counts: by bucket, of the values up to its bound and above the one before; the last is
    of those above every bound."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """How many values."""
        return sum(self.counts)

    def __add__(self, other: HistogramCounts) -> HistogramCounts:
        """Both together; the bounds must be the same."""
        if self.bounds != other.bounds:
            raise ValueError("histograms with other bounds cannot be added")
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return HistogramCounts(self.bounds, counts, self.total + other.total)


class Histogram:
    """Counts values by bucket. Used by one thread."""

    __slots__ = ("_counts", "_total", "bounds")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """One more value; a bound belongs to the bucket below it."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self._total += value

    def counts(self) -> HistogramCounts:
        """As it is now."""
        return HistogramCounts(self.bounds, tuple(self._counts), self._total)
