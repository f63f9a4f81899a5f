"""From records to figures, under the names that such benchmarks use everywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmkit.errors import ConfigError
from llmkit_cli.load.record import RequestRecord
from llmkit_cli.load.run import LoadRun

METRICS = ("ttft", "tpot", "itl", "e2el")
GOALS = ("ttft", "tpot", "e2el")


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """`ttft:500 tpot:50` → milliseconds by metric. Raises ConfigError."""
    goals: dict[str, float] = {}
    for word in " ".join(words).replace(",", " ").split():
        name, _, limit = word.partition(":")
        try:
            value = float(limit)
        except ValueError:
            value = -1.0
        if name not in GOALS or not value > 0:
            raise ConfigError(f"--goodput {word!r} is not one of {', '.join(GOALS)}, a colon, and milliseconds.")
        goals[name] = value
    return goals


def parse_percentiles(text: str) -> list[float]:
    """`50,99.9` → numbers. Raises ConfigError."""
    try:
        values = [float(word) for word in text.replace(",", " ").split()]
    except ValueError:
        values = []
    if not values or not all(0 <= value <= 100 for value in values):
        raise ConfigError(f"--percentiles {text!r} must be numbers from 0 to 100, such as 50,90,99.")
    return values


def figures(
    run: LoadRun, percentiles: Sequence[float] = (99,), goals: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """The result of a run. Times are of requests that were answered whole; rates are over the whole duration.

    errors: by kind (an HTTP status, connection, timeout, stream) how many, and the message of the first one.
    """
    done = [record for record in run.records if record.error_kind is None]
    failed = [record for record in run.records if record.error_kind is not None]
    read = sum(record.prompt_tokens for record in done)
    written = sum(record.output_tokens for record in done)
    result: dict[str, Any] = {
        "duration": run.duration,
        "completed": len(done),
        "failed": len(failed),
        "total_input_tokens": read,
        "total_output_tokens": written,
        "request_throughput": len(done) / run.duration,
        "output_throughput": written / run.duration,
        "total_token_throughput": (read + written) / run.duration,
    }
    if goals:
        result["request_goodput"] = sum(_meets(record, goals) for record in done) / run.duration
    times = _times(done)
    for metric in METRICS:
        result |= _summary(metric, times[metric], percentiles)
    result["max_concurrent_requests"] = run.max_concurrent
    result["client_load"] = run.client_load
    counts = Counter(record.error_kind for record in failed)
    result["errors"] = {
        kind: {"count": count, "first": next(record.error for record in failed if record.error_kind == kind)}
        for kind, count in sorted(counts.items(), key=lambda entry: str(entry[0]))
    }
    return result


def details(run: LoadRun) -> dict[str, Any]:
    """Every request's own numbers, in the order in which they were sent; seconds."""
    begun = min((record.start for record in run.records), default=0.0)
    return {
        "start_times": [record.start - begun for record in run.records],
        "input_lens": [record.prompt_tokens for record in run.records],
        "output_lens": [record.output_tokens for record in run.records],
        "ttfts": [record.ttft for record in run.records],
        "itls": [record.itls for record in run.records],
        "errors_by_request": [record.error for record in run.records],
    }


def _times(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    return {
        "ttft": [record.ttft for record in records if record.ttft is not None],
        "tpot": [tpot for record in records if (tpot := record.tpot) is not None],
        "itl": [itl for record in records for itl in record.itls],
        "e2el": [record.e2el for record in records],
    }


def _summary(metric: str, seconds: list[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Zeros where nothing was measured, as other tools of this kind have it."""
    values = np.array(seconds or [0.0]) * 1e3
    result = {
        f"mean_{metric}_ms": float(values.mean()),
        f"median_{metric}_ms": float(np.median(values)),
        f"std_{metric}_ms": float(values.std()),
    }
    for percentile in sorted({*percentiles, 99}):
        result[f"p{percentile:g}_{metric}_ms"] = float(np.percentile(values, percentile))
    return result


def _meets(record: RequestRecord, goals: Mapping[str, float]) -> bool:
    times = {"ttft": record.ttft, "tpot": record.tpot, "e2el": record.e2el}
    return all((times[name] or 0.0) * 1e3 <= limit for name, limit in goals.items())
