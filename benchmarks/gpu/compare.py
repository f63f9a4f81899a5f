"""Medians and ratios of engines that ran in turns on one GPU.

rm -f runs.jsonl
python benchmarks/gpu/vllm_peer.py qwen3-0.6b --jsonl runs.jsonl
python benchmarks/gpu/engine.py qwen3-0.6b --jsonl runs.jsonl
python benchmarks/gpu/compare.py runs.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path

from rows import ROWS, better_is_more, unit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jsonl", type=Path, nargs="+")
    arguments = parser.parse_args()
    runs: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for path in arguments.jsonl:
        for line in path.read_text().splitlines():
            run = json.loads(line)
            runs[run["shape"], run["row"], run["engine"]].append(run["value"])
    shapes = sorted({shape for shape, _, _ in runs})
    print("| shape | row | unit | llmkit | vLLM | llmkit to vLLM |\n|---|---|---|---|---|---|")
    for shape in shapes:
        for row in ROWS:
            ours, theirs = runs.get((shape, row, "llmkit")), runs.get((shape, row, "vllm"))
            ratio = "" if not (ours and theirs) else f"{settled(row, ours) / settled(row, theirs):.3f}"
            if ours or theirs:
                print(f"| {shape} | {row} | {unit(row)} | {shown(row, ours)} | {shown(row, theirs)} | {ratio} |")


def settled(row: str, values: list[float]) -> float:
    """The median; of `nano`, whose first run is a warm-up as well, the last."""
    return values[-1] if row == "nano" else statistics.median(values)


def shown(row: str, values: list[float] | None) -> str:
    if not values:
        return ""
    digits = 0 if better_is_more(row) else 1 if row == "start" else 2 if row.startswith("tpot") else 3
    text = f"{settled(row, values):.{digits}f}"
    if len(values) > 1:
        text += f" [{', '.join(f'{value:.{digits}f}' for value in values)}]"
    return text


if __name__ == "__main__":
    main()
