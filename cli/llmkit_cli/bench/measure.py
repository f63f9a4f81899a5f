"""Timing of an engine on a workload."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmkit.errors import EngineError

if TYPE_CHECKING:
    from llmkit import LLM
    from llmkit_cli.bench.workloads import Workload


def summary(values: list[float]) -> dict[str, Any]:
    """Median, least and greatest, and the values themselves, to four significant digits."""
    rounded = [float(f"{value:.4g}") for value in values]
    return {
        "median": float(f"{statistics.median(values):.4g}"),
        "min": min(rounded),
        "max": max(rounded),
        "all": rounded,
    }


def repeat(runs: int, run: Callable[[], dict[str, float]]) -> dict[str, Any]:
    """Run several times and summarise every figure."""
    results = [run() for _ in range(runs)]
    return {key: summary([result[key] for result in results]) for key in results[0]}


def vocabulary_of(llm: LLM) -> int:
    return int(llm.engine.prepared.source.config["vocab_size"])


def measure_latency(llm: LLM, items: Workload) -> dict[str, float]:
    """One request after the other, streamed: seconds to the first token, per further token, and in all (means)."""
    from llmkit import SamplingParams

    first, gaps, total = [], [], []
    for item in items:
        llm.reset_prefix_cache()
        params = SamplingParams(max_tokens=item.max_tokens, temperature=0, ignore_eos=True, detokenize=False)
        times = [time.perf_counter()]
        times += [time.perf_counter() for _ in llm.stream({"prompt_token_ids": item.prompt}, params)]
        first.append(times[1] - times[0])
        total.append(times[-1] - times[0])
        if len(times) > 2:
            gaps.append((times[-1] - times[1]) / (item.max_tokens - 1))
    result = {
        "ttft_ms": 1e3 * statistics.mean(first),
        "e2e_s": statistics.mean(total),
        "prefill_tok_s": statistics.mean(len(item.prompt) / t for item, t in zip(items, first, strict=True)),
    }
    if gaps:
        result |= {"tpot_ms": 1e3 * statistics.mean(gaps), "decode_tok_s": 1 / statistics.mean(gaps)}
    return result


def measure_throughput(llm: LLM, items: Workload) -> dict[str, float]:
    """All requests at once, prefix cache cold: tokens per second."""
    from llmkit import SamplingParams

    llm.reset_prefix_cache()
    params = [
        SamplingParams(max_tokens=item.max_tokens, temperature=0, ignore_eos=True, detokenize=False) for item in items
    ]
    steps = llm.stats().num_steps
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": item.prompt} for item in items], params, use_tqdm=False)
    duration = time.perf_counter() - start
    produced = sum(len(output.outputs[0].token_ids) for output in outputs)
    wanted = sum(item.max_tokens for item in items)
    if produced != wanted:
        errors = [output.outputs[0].finish_reason for output in outputs]
        raise EngineError(f"the workload asks for {wanted} tokens, the engine produced {produced} ({set(errors)})")
    read = sum(len(item.prompt) for item in items)
    return {
        "duration_s": duration,
        "output_tok_s": produced / duration,
        "total_tok_s": (produced + read) / duration,
        "requests_s": len(items) / duration,
        "steps_s": (llm.stats().num_steps - steps) / duration,
    }


def measure_startup(settings: dict[str, Any]) -> dict[str, float]:
    """Seconds from spawning a process to its first token, and its peak resident memory in MiB."""
    command = [sys.executable, "-m", "llmkit_cli.bench.first_token", json.dumps(settings)]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        line = child.stdout.readline()
        elapsed = time.perf_counter() - start
        errors = child.stderr.read()
    if not line or child.returncode != 0:
        raise EngineError(
            f"the engine did not start: {errors.strip().splitlines()[-1] if errors.strip() else 'no output'}"
        )
    report = json.loads(line)
    return {"start_to_first_token_s": elapsed, "peak_resident_mib": report["peak_resident_mib"] or 0.0}
