"""Workloads as token ids, the same for every engine. The first four are recorded, the others are made from a seed.

decode-128      one request, 128 tokens in, 128 out
prefill-1024    one request, 1024 in, 1 out
mixed-32        32 requests, 64–256 in, 64–128 out
prefix-768      16 × the same 768 tokens + 32 own, 32 out
start-32        one request, 32 in, 1 out
nano            256 requests, 100–1024 in and out
prefill-4096    16 × 4096 in, 1 out
prefix-2048     64 × the same 2048 tokens + 64 own, 32 out
batch-N         N requests, 128 in, 128 out
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files

from llmkit.errors import ConfigError


@dataclass(frozen=True)
class WorkItem:
    """One request: prompt token ids and how many tokens to generate."""

    prompt: list[int]
    max_tokens: int


Workload = list[WorkItem]

RECORDED = {
    "decode-128": "a_decode",
    "prefill-1024": "b_prefill",
    "mixed-32": "c_offline",
    "prefix-768": "d_prefix",
    "start-32": "e_start",
}


def _ids(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    return [rng.randrange(10, vocabulary) for _ in range(count)]


def _nano(vocabulary: int) -> Workload:
    rng = random.Random(0)
    return [WorkItem(_ids(rng, rng.randint(100, 1024), vocabulary), rng.randint(100, 1024)) for _ in range(256)]


def _prefill(vocabulary: int) -> Workload:
    rng = random.Random(2)
    return [WorkItem(_ids(rng, 4096, vocabulary), 1) for _ in range(16)]


def _shared_prefix(vocabulary: int) -> Workload:
    rng = random.Random(3)
    head = _ids(rng, 2048, vocabulary)
    return [WorkItem(head + _ids(rng, 64, vocabulary), 32) for _ in range(64)]


def _batch(size: int, vocabulary: int) -> Workload:
    rng = random.Random(1 + size)
    return [WorkItem(_ids(rng, 128, vocabulary), 128) for _ in range(size)]


GENERATED: dict[str, Callable[[int], Workload]] = {
    "nano": _nano,
    "prefill-4096": _prefill,
    "prefix-2048": _shared_prefix,
}


def names() -> list[str]:
    return [*RECORDED, *GENERATED, "batch-N"]


def workload(name: str, vocabulary: int) -> Workload:
    """The workload called `name`, ids below `vocabulary`. Raises ConfigError listing the names there are."""
    if name in RECORDED:
        recorded = json.loads(files("llmkit_cli.bench").joinpath("workloads.json").read_text(encoding="utf-8"))
        return [WorkItem([i % vocabulary for i in r["prompt"]], r["max_tokens"]) for r in recorded[RECORDED[name]]]
    limit = min(vocabulary, 100_000)
    if name in GENERATED:
        return GENERATED[name](limit)
    prefix, _, size = name.partition("-")
    if prefix == "batch" and size.isdigit() and 1 <= int(size) <= 4096:
        return _batch(int(size), limit)
    raise ConfigError(f"There is no workload {name!r}.", hint=f"The workloads are {', '.join(names())}.")
