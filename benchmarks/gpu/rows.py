"""What is measured of an engine on a GPU, the same for llmkit and its peers.

    start        s       from the call that makes the engine to its first token
    nano         tok/s   256 requests, 100 to 1024 tokens in and out: output tokens a second
    tpot-N       ms      N requests at once, 128 tokens in: a token's time, from answers of 129 tokens and of 1 (median)
    prefill      tok/s   16 prompts of 4096 tokens, one token out: prompt tokens a second
    prefix       s       64 prompts of the same 2048 tokens and 64 of their own, 32 out; the prefix is in the cache

Prompts are token ids from `llmkit_cli.bench.workloads`, temperature 0.6, lengths fixed, the cache of prefixes emptied
before each run. Every run is a line of JSON: {"engine", "shape", "row", "unit", "value"}.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from llmkit_cli.bench.shapes import SHAPES
from llmkit_cli.bench.workloads import WorkItem, workload

BATCHES = (1, 8, 64, 256)
MAX_MODEL_LEN = 8192
TEMPERATURE = 0.6
UNITS = {"start": "s", "nano": "tok/s", "prefill": "tok/s", "prefix": "s"}
ROWS = ("start", "nano", *(f"tpot-{batch}" for batch in BATCHES), "prefill", "prefix")

Sink = Callable[[str, float], None]
"""Takes a row's name and the value of one run."""


class Engine(Protocol):
    def seconds(self, items: list[WorkItem], max_tokens: int | None = None) -> float:
        """Of answering all at once, each with its own number of tokens or with `max_tokens`."""

    def forget(self) -> None:
        """Empty the cache of prefixes."""


def unit(row: str) -> str:
    return UNITS.get(row, "ms")


def better_is_more(row: str) -> bool:
    return unit(row) == "tok/s"


def sink(engine: str, shape: str, path: Path | None) -> Sink:
    """Prints runs, and appends them to `path`."""

    def take(row: str, value: float) -> None:
        line = {"engine": engine, "shape": shape, "row": row, "unit": unit(row), "value": value}
        print(f"  {engine} {shape} {row}: {value:.4g} {unit(row)}", flush=True)
        if path is not None:
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    return take


def first_token(engine: Engine, shape: str) -> None:
    engine.seconds(workload("batch-1", SHAPES[shape]["vocab_size"]), 1)


def measure(engine: Engine, shape: str, rows: Iterable[str], take: Sink) -> None:
    """All of `rows` but "start". The same has run before what is timed, except for `nano`, whose first run pays for
    what is prepared when it is first needed."""
    vocabulary = SHAPES[shape]["vocab_size"]
    engine.seconds(workload("batch-8", vocabulary), 129)
    for row in rows:
        if row == "nano":
            items = workload("nano", vocabulary)
            for _ in range(2):
                engine.forget()
                take(row, sum(item.max_tokens for item in items) / engine.seconds(items))
        elif row.startswith("tpot-"):
            items = workload(f"batch-{row.removeprefix('tpot-')}", vocabulary)
            engine.seconds(items, 129)
            for seconds in per_token(engine, items, runs=3):
                take(row, seconds * 1e3)
        elif row == "prefill":
            items = workload("prefill-4096", vocabulary)
            for _ in range(3):
                engine.forget()
                take(row, sum(len(item.prompt) for item in items) / engine.seconds(items))
        elif row == "prefix":
            items = workload("prefix-2048", vocabulary)
            for _ in range(2):
                engine.forget()
                engine.seconds([WorkItem(items[0].prompt[:2048], 1)])
                take(row, engine.seconds(items))


def per_token(engine: Engine, items: list[WorkItem], runs: int) -> list[float]:
    """Seconds of a step in which all items get a token, of so many runs. One that is slow by chance where answers have
    one token would make all of a step's time look short: the median of as many runs counts."""
    seconds: dict[int, list[float]] = {1: [], 129: []}
    for _ in range(runs):
        for tokens, of_runs in seconds.items():
            engine.forget()
            of_runs.append(engine.seconds(items, tokens))
    first = statistics.median(seconds[1])
    return [(each - first) / 128 for each in seconds[129]]
