"""What a step costs the host: EngineCore.step with an executor that computes nothing.

    python benchmarks/host_cost.py [--steps N] [--policy NAME]

Prints JSON: median milliseconds of a step at 256 and 1024 running decode requests, alone and with 10 000 waiting
ones, and the share that the waiting ones add. A step is plan, update and outputs. The two variants of a size are
measured in turn, step by step, so that noise of the machine meets both.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time

import torch

from llmkit.config.engine_config import EngineConfig
from llmkit.config.sections import ModelConfig, SchedulerConfig
from llmkit.engine.core import EngineCore
from llmkit.kv_cache.layout import KVCacheLayout, KVGroup, KVSpec
from llmkit.registry import Registry, detect_environment
from llmkit.requests.message import EngineRequest
from llmkit.requests.sampling_params import SamplingParams
from llmkit.scheduling.scheduler import Scheduler
from llmkit.testing.fake_executor import NullExecutor

PROMPT_TOKENS = 128
BLOCK_SIZE = 16


def engine(policy: str, num_running: int, num_waiting: int, steps: int) -> EngineCore:
    """An engine in which `num_running` requests decode and `num_waiting` wait."""
    length = PROMPT_TOKENS + steps + 64
    config = EngineConfig(
        model=ModelConfig(max_model_len=length),
        scheduler=SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=num_running),
    )
    group = KVGroup(KVSpec(1, 64, torch.float32), (0,))
    blocks = 1 + num_running * (-(-length // BLOCK_SIZE))
    layout = KVCacheLayout((group,), blocks, BLOCK_SIZE, BLOCK_SIZE)
    made = Registry.discover().create("scheduler", policy, detect_environment())
    core = EngineCore(Scheduler(config, layout, made), NullExecutor())
    params = SamplingParams(seed=1, max_tokens=length)
    for number in range(num_running + num_waiting):
        core.add(
            EngineRequest(
                request_id=f"request-{number}",
                prompt_token_ids=[(number * 7 + i * 13) % 30_000 + 10 for i in range(PROMPT_TOKENS)],
                sampling_params=params,
                max_tokens=length - PROMPT_TOKENS,
                stop_token_ids=frozenset({2}),
                eos_token_ids=frozenset({2}),
                arrival_time=float(number),
                user=f"user-{number % 100}",
            )
        )
    while len(core.scheduler.running) < num_running:
        core.step()
    core.step()
    return core


def measure(policy: str, num_running: int, num_waiting: int, steps: int) -> dict[str, float]:
    plain, crowded = engine(policy, num_running, 0, steps), engine(policy, num_running, num_waiting, steps)
    gc.collect()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(steps):
        for core, durations in zip((plain, crowded), times, strict=True):
            start = time.perf_counter()
            outputs = core.step()
            durations.append(time.perf_counter() - start)
            if len(outputs) != num_running:
                raise RuntimeError(f"{len(outputs)} outputs from {num_running} running requests")
    alone, with_waiting = (statistics.median(durations) * 1e3 for durations in times)
    worst = statistics.quantiles(times[0], n=100)[98] * 1e3
    return {
        "median_ms": round(alone, 3),
        "p99_ms": round(worst, 3),
        f"median_ms_with_{num_waiting}_waiting": round(with_waiting, 3),
        "added_by_waiting": round(with_waiting / alone - 1, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Host cost of a step with an executor that computes nothing.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--policy", default="fcfs", help="scheduling policy plugin")
    arguments = parser.parse_args()
    result = {
        f"running_{running}": measure(arguments.policy, running, arguments.waiting, arguments.steps)
        for running in (256, 1024)
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
