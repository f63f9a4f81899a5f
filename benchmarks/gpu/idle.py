"""How much of a decode step the GPU has nothing to do: a step's time beside that of its graph alone.

    python benchmarks/gpu/idle.py qwen3-0.6b --batches 1 8 64

A step's time is the difference between answers of 65 tokens and of 1, over 64. Then the graph of the last step, whose
contexts are as long as those of a step of `rows.py` on average, is replayed without anything between the replays. Only
for batches whose prompts fit one step: all rows must be in the last one.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from engine import Llmkit, opened

from llmkit import LLM
from llmkit.execution.cuda.decode_graphs import DecodeGraphs
from llmkit_cli.bench.shapes import SHAPES
from llmkit_cli.bench.workloads import workload

REPLAYS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", choices=list(SHAPES))
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 8, 64))
    arguments = parser.parse_args()
    for shape in arguments.shapes:
        with opened(shape) as llm:
            for batch in arguments.batches:
                compare(llm, shape, batch)


def compare(llm: LLM, shape: str, batch: int) -> None:
    engine, items = Llmkit(llm), workload(f"batch-{batch}", SHAPES[shape]["vocab_size"])
    most = llm.engine.config.scheduler.max_num_batched_tokens
    assert most is None or sum(len(item.prompt) for item in items) <= most, "the prompts need several steps"
    times = []
    for _ in range(4):
        engine.forget()
        first = engine.seconds(items, 1)
        engine.forget()
        times.append((engine.seconds(items, 65) - first) / 64 * 1e3)
    step, alone = statistics.median(times[1:]), replayed(llm, batch)
    print(
        f"{shape}, {batch:3}: {step:.3f} ms a step, {alone:.3f} ms its graph: idle {1 - alone / step:.1%}", flush=True
    )


def replayed(llm: LLM, batch: int) -> float:
    """Milliseconds of a replay of the graph of the last step."""
    graphs: DecodeGraphs = llm.engine.core.executor._worker._runner._graphs
    steps = {rows: step.graph for (rows, _, _), step in graphs._steps.items() if step.graph is not None}
    graph = steps[min(rows for rows in steps if rows >= batch)]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / REPLAYS


if __name__ == "__main__":
    main()
