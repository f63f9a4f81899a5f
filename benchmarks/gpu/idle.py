"""What part of a decode step the GPU has nothing to do: the time between the end of a step's graph and the start of the
next one's, by events that the GPU itself records there.

    python benchmarks/gpu/idle.py qwen3-0.6b --batches 1 8 64 256

Requests of 128 tokens are answered with 129; counted are the steps in which all of them get a token and nothing else is
done. What is copied to and from the device between two graphs counts as idle. The two events of a step take about a
microsecond, which counts as work. Beside it stands the host's time between launches in runs without events.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from engine import Llmkit, opened

from llmkit_cli.bench.shapes import SHAPES
from llmkit_cli.bench.workloads import workload

if TYPE_CHECKING:
    from llmkit import LLM

TOKENS = 129
RUNS = 5
FILLING = 2
"""Steps that are left out at the beginning: their launches follow one another at once, as nothing is under way yet."""


@dataclass
class DecodeSteps:
    """Stands in for `run` of the engine's decode graphs and takes note of the steps of `rows` rows: when they were
    launched, in seconds, and the runs of `TimedGraph`s."""

    graphs: Any
    rows: int
    launched: list[float] = field(default_factory=list)
    runs: list[tuple[Any, Any]] = field(default_factory=list)
    counts: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._run = self.graphs.run

    def __call__(self, plan: Any, pages: int, ending: Any) -> Any:
        self.counts = plan.num_rows == self.rows
        launched = self._run(plan, pages, ending)
        if self.counts and launched is not None:
            self.launched.append(time.perf_counter())
        return launched


@dataclass
class TimedGraph:
    """Stands in for a captured graph and notes when the GPU starts and ends each of its runs that `steps` counts."""

    graph: Any
    steps: DecodeSteps

    def replay(self) -> None:
        if not self.steps.counts:
            self.graph.replay()
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        self.steps.runs.append((start, end))


@dataclass(frozen=True)
class Idle:
    """Of consecutive steps: milliseconds of their graphs and between these."""

    graphs: list[float]
    gaps: list[float]

    @property
    def part(self) -> float:
        return sum(self.gaps) / (sum(self.gaps) + sum(self.graphs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", choices=list(SHAPES))
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 8, 64, 256))
    arguments = parser.parse_args()
    for shape in arguments.shapes:
        with opened(shape) as llm:
            for batch in arguments.batches:
                try:
                    compare(llm, shape, batch)
                except Exception as error:  # one that fails leaves the others their turn
                    print(f"{shape}, {batch:3}: FAILED {type(error).__name__}: {str(error)[:400]}", flush=True)


def compare(llm: LLM, shape: str, batch: int) -> None:
    engine, items = Llmkit(llm), workload(f"batch-{batch}", SHAPES[shape]["vocab_size"])
    engine.seconds(items, TOKENS)  # captures graphs
    plain: list[float] = []
    timed: list[Idle] = []
    for _ in range(RUNS):
        engine.forget()
        with decode_steps(llm, batch) as steps:
            engine.seconds(items, TOKENS)
        plain += intervals(steps.launched)
        engine.forget()
        with decode_steps(llm, batch, timed=True) as steps:
            engine.seconds(items, TOKENS)
        torch.cuda.synchronize()
        timed.append(idle(steps.runs))
    print(f"{shape}, {batch:3}: {described(timed, plain)}", flush=True)


def described(runs: list[Idle], plain: list[float]) -> str:
    """plain: milliseconds between launches in runs without events."""
    parts = sorted(each.part for each in runs)
    graph = statistics.fmean(graph for each in runs for graph in each.graphs)
    gaps = sorted(1e3 * gap for each in runs for gap in each.gaps)
    return (
        f"idle {statistics.median(parts):.2%} [{parts[0]:.2%} - {parts[-1]:.2%}]; a graph takes {graph:.3f} ms, "
        f"between two are {statistics.fmean(gaps):.1f} us [median {statistics.median(gaps):.1f}, 99 % below "
        f"{gaps[int(0.99 * len(gaps))]:.1f}, most {gaps[-1]:.1f}]; without events {statistics.fmean(plain):.3f} ms a "
        f"step [median {statistics.median(plain):.3f}]"
    )


@contextmanager
def decode_steps(llm: LLM, rows: int, *, timed: bool = False) -> Iterator[DecodeSteps]:
    graphs = llm.engine.core.executor._worker._runner._graphs
    graphs.run = steps = DecodeSteps(graphs, rows)
    captured = [step for step in graphs._steps.values() if timed and step.graph is not None]
    for step in captured:
        step.graph = TimedGraph(step.graph, steps)
    try:
        yield steps
    finally:
        del graphs.run  # the class's own again
        for step in captured:
            step.graph = step.graph.graph


def idle(runs: list[tuple[Any, Any]]) -> Idle:
    """Of runs of graphs, (start, end) each, one after the other."""
    settled = runs[FILLING:]
    return Idle(
        [start.elapsed_time(end) for start, end in settled[1:]],
        [before.elapsed_time(after) for (_, before), (after, _) in pairwise(settled)],
    )


def intervals(times: list[float]) -> list[float]:
    """Milliseconds between steps."""
    return [(after - before) * 1e3 for before, after in pairwise(times[FILLING:])]


if __name__ == "__main__":
    main()
