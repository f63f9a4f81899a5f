"""When requests are sent."""

from __future__ import annotations

import math
import random


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start for each of `count` requests at `rate` a second; infinite: all at once.

    The time between two is Gamma(burstiness, 1 / (rate * burstiness)): 1 is a Poisson process, below 1 requests come
    in bursts, above 1 more evenly, towards a metronome.
    """
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return times
