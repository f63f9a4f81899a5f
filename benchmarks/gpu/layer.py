"""What a layer of a decode step is made of: microseconds from the end of one kernel to the end of the next.

    python benchmarks/gpu/layer.py qwen3-0.6b --batches 1 8 64

Kernels start before the one ahead has ended, so that their durations overlap; the ends tell what each adds. Medians
over the layers of a trace, from one attention kernel to the next.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import torch
from engine import Llmkit, opened

from llmkit_cli.bench.shapes import SHAPES
from llmkit_cli.bench.workloads import workload

ATTENTION = ("attention_kernel", "decode_kernel")
"""In the names of kernels of which a layer of a decode step has one."""

Kernels = list[tuple[str, float]]
"""Names and ends in µs, in the order of their starts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", choices=list(SHAPES))
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 8, 64))
    arguments = parser.parse_args()
    for shape in arguments.shapes:
        with opened(shape) as llm:
            for batch in arguments.batches:
                print_layer(traced(Llmkit(llm), shape, batch), f"{shape}, {batch:3}")


def traced(engine: Llmkit, shape: str, batch: int) -> Kernels:
    """Of the last steps of answers of 33 tokens; the same has run before."""
    items = workload(f"batch-{batch}", SHAPES[shape]["vocab_size"])
    engine.seconds(items, 33)
    engine.forget()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
        engine.seconds(items, 33)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        record.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    kernels = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e.get("cat") == "kernel")
    return [(name, end) for _, end, name in kernels[len(kernels) // 3 :]]  # behind the prompts


def print_layer(kernels: Kernels, title: str) -> None:
    """Raises SystemExit if there are no attention kernels to tell layers apart by."""
    firsts = [i for i, (name, _) in enumerate(kernels) if any(each in name for each in ATTENTION)]
    spans = list(pairwise(firsts))
    if not spans:
        raise SystemExit(f"{title}: no kernels named {' or '.join(ATTENTION)} in the trace")
    length = Counter(end - start for start, end in spans).most_common(1)[0][0]
    spans = [span for span in spans if span[1] - span[0] == length]
    whole = statistics.median(kernels[end][1] - kernels[start][1] for start, end in spans)
    print(f"{title}: {whole:.2f} µs a layer of {length} kernels, median of {len(spans)}")
    for place in range(1, length + 1):
        added = statistics.median(kernels[start + place][1] - kernels[start + place - 1][1] for start, _ in spans)
        print(f"  {added:6.2f}  {kernels[spans[0][0] + place][0][:90]}", flush=True)


if __name__ == "__main__":
    main()
