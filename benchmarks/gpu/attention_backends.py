"""Attention backends beside one another on a GPU, in one run: right on random shapes, then timed.

    python benchmarks/gpu/attention_backends.py --backends triton flashinfer flash_attn

Per case and backend, microseconds for one layer, the write of new keys and values included:

    device  of as many layers as caches, captured in a graph; the caches take turns, so that the second-level cache does
            not help; "of limit" beside it
    step    of a whole step of 28 layers launched one by one, with its plan, as steps with prompts are: whatever takes
            longer of host and device
    plan    of a step's plan on the host: for decodes, what is done before each replay of a graph; not divided by layers
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from attention import in_graph, measure_ceilings, work_of
from attention_cases import CASES, LAYER, RELATIVE_ERROR, Case, Trial, definition, describe, make_batch

from llmkit.hookspecs.attention import AttentionBackend, AttentionQuery
from llmkit_attention.flash_attn_backend import FlashAttnAttention
from llmkit_attention.flashinfer_backend import FlashInferAttention
from llmkit_attention.triton_backend import TritonAttention

LAYERS = 28
SHOWN = ("decode 64 x 1024", "decode 1 x 4096", "decode 256 x 512", "prefill 8 x 2048", "mixed", "decode uneven")
MORE = {
    "prompt 256": Case((256,), (256,)),
    "prompt 512": Case((512,), (512,)),
    "prompt 1024": Case((1024,), (1024,)),
    "prompt 2048": Case((2048,), (2048,)),
    "prompt 4096": Case((4096,), (4096,)),
    "prompts 2 x 4096": Case((4096,) * 2, (4096,) * 2),
    "chunk 1024 over 8192, 63 decodes": Case((9216, *(900,) * 63), (1024, *(1,) * 63)),
}
BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "triton": TritonAttention,
    "flashinfer": lambda: FlashInferAttention(workspace_mib=512),
    "flash_attn": lambda: FlashAttnAttention(least_tokens=1),  # wherever the library can be asked
}


def right(backend: AttentionBackend, trial: Trial) -> float | None:
    """Relative error over a batch of random lengths; None if the backend does not take such a layer."""
    layer, dtype = trial.layer, trial.dtype
    query_of = AttentionQuery(
        "cuda", torch.cuda.get_device_capability(), dtype, dtype, layer.num_heads, layer.num_kv_heads,
        layer.head_size, layer.sliding_window, layer.soft_cap,
    )  # fmt: skip
    if backend.support(query_of).reasons or trial.case.page_size not in backend.page_sizes():
        return None
    batch, (cache,), query, key, value = make_batch(trial.case, layer, dtype, seed=trial.seed)
    output = backend.forward(layer, query, key, value, cache, backend.plan(batch))
    expected = definition(layer, batch, cache, query)
    return ((output.double() - expected).norm() / expected.norm()).item()


def timed(backend: AttentionBackend, case: Case) -> dict[str, float]:
    moved, _ = work_of(case)
    copies = max(2, min(12, math.ceil(200e6 / moved)))
    batch, caches, query, key, value = make_batch(case, LAYER, torch.bfloat16, copies=copies)
    layers = [replace(LAYER, index=index) for index in range(LAYERS)]
    plan = backend.plan(batch)

    def calls(plan: Any) -> list[Callable[[], Any]]:
        return [
            lambda layer=layer, cache=cache: backend.forward(layer, query, key, value, cache, plan)
            for layer, cache in zip(layers, caches, strict=False)
        ]

    def step() -> None:
        of_step = backend.plan(batch)
        for layer in layers:
            backend.forward(layer, query, key, value, caches[layer.index % copies], of_step)

    def planned() -> None:
        if max(case.new) == 1:
            backend.follow(plan, batch.seq_lens_np)
        else:
            backend.forward(layers[0], query, key, value, caches[0], backend.plan(batch))

    planned()
    try:
        device = in_graph(calls(plan), 15)
    except RuntimeError as error:
        print(f"   not captured: {str(error)[:200]}", flush=True)
        torch.cuda.synchronize()
        device = math.nan
    return {"device": device, "step": wall(step) / LAYERS, "plan": host(planned)}


def wall(call: Callable[[], Any]) -> float:
    """Median microseconds from the call until the device is done."""
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * 1e6


def host(call: Callable[[], Any]) -> float:
    """Median microseconds that the host takes for a call while the device has nothing to do."""
    times = []
    for _ in range(15):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def check_all(name: str, backend: AttentionBackend, trials: list[Trial]) -> None:
    errors: list[float] = []
    for trial in trials:
        error = right(backend, trial)
        if error is None:
            continue
        errors.append(error)
        if not error < RELATIVE_ERROR[trial.dtype]:
            print(f"WRONG {name}: {error:.2g} {describe(trial)}", flush=True)
    print(f"{name}: {len(errors)} shapes, largest relative error {max(errors, default=math.nan):.2g}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", choices=list(BACKENDS), default=["triton", "flashinfer", "flash_attn"])
    parser.add_argument("--cases", nargs="+", default=[*SHOWN, *MORE])
    parser.add_argument("--json", type=Path, help="file for all figures")
    arguments = parser.parse_args()
    cases = CASES | MORE
    ceilings = measure_ceilings()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {os.cpu_count()} processors: copy "
        f"{ceilings.copy / 1e12:.2f} TB/s, bfloat16 product {ceilings.product / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for name in arguments.backends:
        backend = BACKENDS[name]()
        start = time.perf_counter()
        trials = [
            Trial(LAYER, cases[case], torch.bfloat16, torch.bfloat16, number)
            for number, case in enumerate(arguments.cases)
        ]
        try:
            check_all(name, backend, trials)
            print(f"{name}: with compiling {time.perf_counter() - start:.1f} s", flush=True)
            for case in arguments.cases:
                rows.setdefault(case, {})[name] = timed(backend, cases[case])
        except Exception as error:  # a backend that fails leaves the others their turn
            print(f"FAILED {name}: {type(error).__name__}: {str(error)[:600]}", flush=True)
    print(f"\n{'microseconds':34} {'limit':>7}  backend         {'device':>8} {'of limit':>8} {'step':>8} {'plan':>8}")
    for case, of_backends in rows.items():
        limit = ceilings.limit(cases[case])
        for name, row in of_backends.items():
            print(
                f"{case:34} {limit:7.1f}  {name:15} {row['device']:8.1f} {limit / row['device']:8.0%} "
                f"{row['step']:8.1f} {row['plan']:8.1f}"
            )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
