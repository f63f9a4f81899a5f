"""What part of a decode step the GPU has nothing to do: the time between two steps beside that of the graph alone.

    python benchmarks/gpu/idle.py qwen3-0.6b --batches 1 8 64 256

Requests of 128 tokens are answered with 129; counted are the steps in which all of them get a token and nothing else is
done. In the middle of an answer that is not timed the step that was just launched is replayed many times without
anything between the replays: its inputs are where they were, and all of its rows are in use. Tokens and keys that the
replays write are worth nothing, and nothing depends on them. What is copied to and from the device between two
graphs counts as idle.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from engine import Llmkit, opened

from llmkit_cli.bench.shapes import SHAPES
from llmkit_cli.bench.workloads import workload

if TYPE_CHECKING:
    from llmkit import LLM

TOKENS = 129
REPLAYS = 200
RUNS = 5


class DecodeSteps:
    """Stands in for `run` of the engine's decode graphs and takes note of when steps of `rows` rows are launched.

    replay_at: the step after whose launch its graph is replayed; None for never.
    """

    def __init__(self, graphs: Any, rows: int, replay_at: int | None = None) -> None:
        self._graphs, self._run, self._rows, self._replay_at = graphs, graphs.run, rows, replay_at
        self.launched: list[float] = []
        self.alone: float | None = None
        """Milliseconds of a replay."""

    def __call__(self, plan: Any, pages: int, ending: Any) -> Any:
        launched = self._run(plan, pages, ending)
        if plan.num_rows == self._rows and launched is not None:
            self.launched.append(time.perf_counter())
            if len(self.launched) - 1 == self._replay_at:
                self.alone = self._replayed(launched[0])
        return launched

    def _replayed(self, inputs: Any) -> float:
        graph = next(step.graph for step in self._graphs._steps.values() if step.inputs is inputs)
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / REPLAYS


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
    runs = []
    for _ in range(RUNS + 1):
        engine.forget()
        with decode_steps(llm, batch) as steps:
            engine.seconds(items, TOKENS)
        runs.append(intervals(steps.launched))
    means = [statistics.fmean(run) for run in runs[1:]]  # the first captures graphs
    typical = statistics.median([interval for run in runs[1:] for interval in run])
    engine.forget()
    with decode_steps(llm, batch, replay_at=len(runs[-1]) // 2) as steps:
        engine.seconds(items, TOKENS)
    alone, step = steps.alone, statistics.median(means)
    assert alone is not None, "no step was replayed"
    print(
        f"{shape}, {batch:3}: {step:.3f} ms a step [{min(means):.3f} - {max(means):.3f}, median of all "
        f"{RUNS * len(runs[-1])} steps {typical:.3f}], {alone:.3f} ms its graph: idle {1 - alone / step:.1%}",
        flush=True,
    )


@contextmanager
def decode_steps(llm: LLM, rows: int, replay_at: int | None = None) -> Iterator[DecodeSteps]:
    graphs = llm.engine.core.executor._worker._runner._graphs
    graphs.run = steps = DecodeSteps(graphs, rows, replay_at)
    try:
        yield steps
    finally:
        del graphs.run  # the class's own again


def intervals(times: list[float]) -> list[float]:
    """Milliseconds between steps. The pipeline fills with the first two, whose launches follow one another at once."""
    settled = times[2:]
    return [(after - before) * 1e3 for before, after in pairwise(settled)]


if __name__ == "__main__":
    main()
