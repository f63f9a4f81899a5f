"""What a long prompt does to requests that are answering: prompts in steps of their own against chunks beside decoding.

    python benchmarks/prefill_interference.py --model MODEL [--prompt 4096] [--runs 1]

Four requests decode; then a prompt of 4096 tokens arrives. Prints JSON for each way of scheduling: the time between two
tokens of the running requests before the prompt arrives and from then to its first token (median and longest), and the
time to that first token. `classic` computes prompts first, in steps of their own; `fcfs` computes chunks in the same
steps as decoding, as large as the token budget allows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import pairwise
from typing import Any

from llmkit import LLM, SamplingParams
from llmkit.engine.core import EngineCore
from llmkit.requests.message import EngineRequest

RUNNING = 4
STEPS_BEFORE = 16
WAYS = {"classic": ("classic", 2048), "fcfs, chunks of 512": ("fcfs", 512), "fcfs, chunks of 128": ("fcfs", 128)}


def request(name: str, length: int, max_tokens: int) -> EngineRequest:
    seed = sum(map(ord, name))
    return EngineRequest(
        request_id=name,
        prompt_token_ids=[(seed * 31 + 7 * i) % 30_000 + 10 for i in range(length)],
        sampling_params=SamplingParams(temperature=0, seed=0, max_tokens=max_tokens),
        max_tokens=max_tokens,
        arrival_time=time.monotonic(),
    )


def step(core: EngineCore, arrivals: dict[str, list[float]]) -> None:
    """One step; notes when each request got a token."""
    outputs = core.step()
    now = time.perf_counter()
    for output in outputs:
        if output.error:
            raise RuntimeError(output.error)
        if output.new_token_ids:
            arrivals.setdefault(output.request_id, []).append(now)


def gaps(arrivals: dict[str, list[float]], start: float, end: float) -> list[float]:
    """Milliseconds between two tokens of the running requests, of those that arrived in (start, end]."""
    return [
        (later - earlier) * 1e3
        for name, times in arrivals.items()
        if name != "long"
        for earlier, later in pairwise(times)
        if start < later <= end
    ]


def measure(model: str, policy: str, budget: int, length: int) -> dict[str, float]:
    arrivals: dict[str, list[float]] = {}
    with LLM(
        model, scheduler=policy, max_num_batched_tokens=budget, max_model_len=length + 64, num_blocks=length // 16 + 200
    ) as llm:
        core = llm.engine.core
        for i in range(RUNNING):
            core.add(request(f"running-{i}", 64, length))
        while len(arrivals.get("running-0", ())) < STEPS_BEFORE:
            step(core, arrivals)
        begun = time.perf_counter()
        core.add(request("long", length, 4))
        while "long" not in arrivals:
            step(core, arrivals)
        first = arrivals["long"][0]
        # A gap that the prompt's last step has begun ends with the next token.
        step(core, arrivals)
        end = time.perf_counter()
        core.abort(["long", *(f"running-{i}" for i in range(RUNNING))])
    before, during = gaps(arrivals, 0.0, begun), gaps(arrivals, begun, end)
    return {
        "itl_before_ms": statistics.median(before),
        "itl_during_median_ms": statistics.median(during),
        "itl_during_longest_ms": max(during),
        "ttft_of_prompt_s": first - begun,
        "tokens_meanwhile": len(during) / RUNNING,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Inter-token latency of running requests when a long prompt arrives.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=1)
    arguments = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    for _ in range(arguments.runs):
        for name, (policy, budget) in WAYS.items():
            runs[name].append(measure(arguments.model, policy, budget, arguments.prompt))
    result: dict[str, Any] = {
        name: {key: round(statistics.median(run[key] for run in done), 2) for key in done[0]}
        for name, done in runs.items()
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
