"""The `triton` attention backend on a GPU: first right, then fast.

    python benchmarks/gpu/attention.py

Checks the backend against attention by its definition in float64 on random shapes, page sizes, types, masks and
mixtures of rows. Then times decode, prefill and mixed batches (32 query heads, 8 KV heads, head size 128, bfloat16)
with the shipped block sizes and with those of a list, beside torch's scaled_dot_product_attention on dense keys, and
beside the two ceilings of the machine: copying memory and multiplying matrices. Kernels are compiled by a pool of
processes into Triton's cache. A configuration that fails is a line in the output and stops nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import torch
import triton
from attention_cases import (
    CASES,
    DEVICE,
    LAYER,
    Case,
    check,
    describe,
    make_batch,
    random_trial,
    shared_trial,
    timed_trials,
)

from llmkit_attention.triton_backend import TritonAttention
from llmkit_attention.triton_cache import write_kv
from llmkit_attention.triton_tiles import Device, QueryClass, Tile, tile_for

DECODE_TILES = (
    Tile(16, 32, 2, 4, False, 4),
    Tile(16, 32, 2, 6, False, 3),
    Tile(16, 32, 2, 3, False, 4),
    Tile(16, 32, 1, 4, False, 4),
    Tile(16, 64, 4, 3, False, 3),
    Tile(16, 64, 4, 4, False, 2),
    Tile(16, 64, 4, 2, False, 4),
    Tile(16, 128, 4, 2, False, 3),
    Tile(16, 128, 8, 3, False, 1),
)
LONG_TILES = (
    Tile(128, 64, 8, 3, True, 1),
    Tile(128, 64, 8, 2, True, 2, max_registers=128),
    Tile(256, 64, 16, 3, True, 1, max_registers=128),
    Tile(128, 32, 8, 3, True, 2, max_registers=128),
    Tile(128, 32, 8, 4, True, 2, max_registers=128),
    Tile(128, 128, 8, 2, True, 1),
    Tile(128, 64, 8, 4, True, 1),
    Tile(64, 64, 4, 2, True, 2),
)


SHARED_TILES = (
    Tile(64, 64, 4, 2, False, 2),
    Tile(64, 64, 4, 3, False, 1),
    Tile(64, 64, 4, 4, False, 1),
    Tile(64, 32, 4, 4, False, 2),
    Tile(64, 128, 4, 2, False, 1),
    Tile(128, 64, 8, 3, False, 1),
    Tile(128, 64, 8, 2, False, 2, max_registers=128),
    Tile(128, 128, 8, 2, False, 1),
)


def backend_with(tile: Tile | None, query_class: QueryClass | None) -> TritonAttention:
    """The backend with `tile` for few tokens ("decode", "split"), for many ("long", "short") or for keys that rows
    share ("shared")."""
    if tile is None:
        return TritonAttention()

    def choose(padded_head_size: int, wanted: QueryClass, itemsize: int, device: Device) -> Tile:
        return tile if _CLASSES[wanted] == query_class else tile_for(padded_head_size, wanted, itemsize, device)

    return TritonAttention(choose_tile=choose)


_CLASSES: dict[QueryClass, QueryClass] = {
    "decode": "decode", "split": "decode", "short": "long", "long": "long", "full": "long", "shared": "shared",
}  # fmt: skip


def compile_for(case: Case, tile: Tile | None, query_class: QueryClass | None) -> float:
    """Run once, so that the kernels are in the cache. Seconds."""
    start = time.perf_counter()
    batch, (cache,), query, key, value = make_batch(case, LAYER, torch.bfloat16)
    backend = backend_with(tile, query_class)
    backend.forward(LAYER, query, key, value, cache, backend.plan(batch))
    torch.cuda.synchronize()
    return time.perf_counter() - start


def in_graph(calls: Sequence[Callable[[], Any]], replays: int) -> float:
    """Median microseconds of one of `calls` on the device: captured one after another in a graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def eager(call: Callable[[], Any]) -> float:
    """Median microseconds of a call outside graphs, from a cold second-level cache, as peers were measured."""
    return float(triton.testing.do_bench(call, warmup=10, rep=50, return_mode="median")) * 1e3


def host(call: Callable[[], Any]) -> float:
    """Microseconds that the host takes for a call."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(50):
        call()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / 50 * 1e6


def work_of(case: Case) -> tuple[float, float]:
    """(bytes moved at least, operations) of a case."""
    token_bytes = 2 * 2 * LAYER.num_kv_heads * LAYER.head_size
    again = sum(tokens for row, (source, tokens) in enumerate(case.shared) if source != row)
    moved = (sum(case.lengths) - again) * token_bytes + sum(case.new) * (
        2 * token_bytes + 4 * LAYER.num_heads * LAYER.head_size
    )
    pairs = sum(new * (length - new) + new * (new + 1) / 2 for length, new in zip(case.lengths, case.new, strict=True))
    return moved, 4.0 * LAYER.num_heads * LAYER.head_size * pairs


@dataclass(frozen=True)
class Ceilings:
    """Measured: bytes per second of a copy (read plus written), operations per second of a large bfloat16 product."""

    copy: float
    product: float

    def limit(self, case: Case) -> float:
        """Microseconds that a case takes at least."""
        moved, operations = work_of(case)
        return max(moved / self.copy, operations / self.product) * 1e6


def measure_ceilings() -> Ceilings:
    source = torch.empty(2**30, dtype=torch.uint8, device=DEVICE).random_(0, 255)
    target = torch.empty_like(source)
    copy = eager(lambda: target.copy_(source))
    left, right = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    product = eager(lambda: left @ right)
    return Ceilings(2 * 2**30 / copy * 1e6, 2 * 8192**3 / product * 1e6)


def time_case(case: Case, tile: Tile | None, query_class: QueryClass | None, *, told: bool = True) -> float:
    """Microseconds on the device, caches taking turns so that the second-level cache does not help. told: of what rows
    share."""
    moved, _ = work_of(case)
    copies = max(2, min(12, math.ceil(200e6 / moved)))
    batch, caches, query, key, value = make_batch(case, LAYER, torch.bfloat16, copies=copies)
    backend = backend_with(tile, query_class)
    plan = backend.plan(batch if told else replace(batch, prefixes=None))
    calls = [lambda c=cache: backend.forward(LAYER, query, key, value, c, plan) for cache in caches]
    return in_graph(calls, 15)


def time_parts(case: Case) -> dict[str, float]:
    """With the shipped tiles: eager, host, planning, the write alone, and all if the backend is not told of what rows
    share; microseconds."""
    batch, (cache,), query, key, value = make_batch(case, LAYER, torch.bfloat16)
    backend = TritonAttention()
    plan = backend.plan(batch)

    def call() -> Any:
        return backend.forward(LAYER, query, key, value, cache, plan)

    def planned() -> Any:
        return backend._prepare(LAYER, query, cache, backend.plan(batch), query)

    write = in_graph([lambda: write_kv(key, value, cache, plan.slot_mapping)] * 10, 10)
    parts = {"eager": eager(call), "host": host(call), "plan": host(planned), "write": write}
    if case.shared:
        parts["apart"] = time_case(case, None, None, told=False)
    return parts


def time_sdpa(case: Case) -> float | None:
    """torch on dense keys, where the rows are alike: not paged, nothing written."""
    if len(set(case.lengths)) > 1 or len(set(case.new)) > 1 or case.new[0] not in (1, case.lengths[0]):
        return None
    rows, length, new = len(case.lengths), case.lengths[0], case.new[0]
    moved, _ = work_of(case)
    copies = max(2, min(12, math.ceil(200e6 / moved)))

    def draw(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(rows, heads, tokens, LAYER.head_size, device=DEVICE, dtype=torch.bfloat16)

    query = draw(LAYER.num_heads, new)
    dense = [(draw(LAYER.num_kv_heads, length), draw(LAYER.num_kv_heads, length)) for _ in range(copies)]
    attend = torch.nn.functional.scaled_dot_product_attention
    calls = [lambda k=k, v=v: attend(query, k, v, is_causal=new > 1, enable_gqa=True) for k, v in dense]
    return in_graph(calls, 15)


Variant = tuple[Tile | None, QueryClass | None]


class Report:
    """Prints as it goes, collects for the JSON line at the end; failures do not stop anything."""

    def __init__(self, budget: float) -> None:
        self._start, self._budget = time.perf_counter(), budget
        self.data: dict[str, Any] = {"failures": []}

    def left(self) -> float:
        return self._budget - (time.perf_counter() - self._start)

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._start:6.1f} s] {text}", flush=True)

    def failed(self, what: str, error: BaseException | str) -> None:
        message = error if isinstance(error, str) else "".join(traceback.format_exception_only(error)).strip()
        self.data["failures"].append([what, message[-300:]])
        self.say(f"FAILED {what}: {message[-300:]}")


def variants(case: Case) -> list[Variant]:
    """What is tried for a case: the shipped table, then other tiles for the class that matters most."""
    if case.shared:
        return [(None, None), *((tile, "shared") for tile in SHARED_TILES)]
    if max(case.new) == 1:
        return [(None, None), *((tile, "decode") for tile in DECODE_TILES)]
    return [(None, None), *((tile, "long") for tile in LONG_TILES)]


def run_checks(report: Report, pool: Pool, count: int) -> None:
    trials = [*timed_trials(), *(random_trial(seed) for seed in range(count))]
    trials += [shared_trial(seed) for seed in range(count // 2)]
    pending = [pool.apply_async(check, (trial,)) for trial in trials]
    good = 0
    worst: dict[str, float] = {}
    for trial, answer in zip(trials, pending, strict=True):
        try:
            result = answer.get(timeout=max(1.0, report.left() - 50))
        except Exception as error:
            report.failed(describe(trial), error)
            continue
        name = str(trial.dtype)[6:]
        worst[name] = max(worst.get(name, 0.0), result["error"])
        good += result["ok"]
        if not result["ok"]:
            report.failed(describe(trial), f"wrong: {result}")
    report.data["right"] = {"passed": good, "of": len(trials), "worst": worst}
    report.say(f"right: {good} of {len(trials)} shapes; largest relative errors {worst}")


def compiled(report: Report, pool: Pool, names: Sequence[str]) -> dict[str, list[Variant]]:
    """The variants of each case that run in another process, where a crash does no harm; now in Triton's cache."""
    tried = [(name, variant) for name in names for variant in variants(CASES[name])]
    pending = [pool.apply_async(compile_for, (CASES[name], *variant)) for name, variant in tried]
    good: dict[str, list[Variant]] = {}
    for (name, variant), answer in zip(tried, pending, strict=True):
        try:
            answer.get(timeout=max(1.0, report.left() - 50))
        except Exception as error:
            report.failed(f"{name}, {variant[0]}", error)
        else:
            good.setdefault(name, []).append(variant)
    report.say(f"compiled {sum(map(len, good.values()))} of {len(tried)} variants")
    return good


def run_timings(report: Report, usable: dict[str, list[Variant]]) -> None:
    ceilings = measure_ceilings()
    report.data["ceilings"] = asdict(ceilings)
    report.say(f"copy {ceilings.copy / 1e12:.2f} TB/s, bfloat16 product {ceilings.product / 1e12:.0f} TFLOP/s")
    rows: dict[str, Any] = report.data.setdefault("cases", {})
    for name, usable_variants in usable.items():
        case = CASES[name]
        row = rows[name] = {"limit": ceilings.limit(case), "tiles": []}
        for what, measure in (("parts", time_parts), ("sdpa", time_sdpa)):
            try:
                row[what] = measure(case)
            except Exception as error:
                report.failed(f"{name}, {what}", error)
        for tile, query_class in usable_variants:
            if report.left() < 5:
                report.say("no time left for more tiles")
                break
            try:
                row["tiles"].append([None if tile is None else asdict(tile), time_case(case, tile, query_class)])
            except Exception as error:
                report.failed(f"{name}, {tile}", error)
        print_case(report, name, row)


def print_case(report: Report, name: str, row: dict[str, Any]) -> None:
    report.say(f"{name}: the limit is {row['limit']:.1f} us")
    for tile, us in sorted(row["tiles"], key=lambda entry: entry[1]):
        print(f"   {us:8.1f} us {row['limit'] / us:5.0%}  {'shipped' if tile is None else short(tile)}", flush=True)


def short(tile: dict[str, Any]) -> str:
    """A tile in a few characters."""
    loops = "phased" if tile["phased"] else "masked"
    limit = "" if tile["max_registers"] is None else " registers {max_registers}"
    text = (
        "{block_m}x{block_n} warps {num_warps} stages {num_stages}" + limit + " {loops} per SM {programs_per_processor}"
    )
    return text.format(loops=loops, **tile)


def print_summary(report: Report) -> None:
    print(
        f"\nmicroseconds           {'limit':>7} {'shipped':>8} {'best':>8} {'of limit':>8} {'sdpa':>8} "
        f"{'apart':>7} {'write':>6} {'eager':>7} {'host':>6} {'plan':>6}"
    )
    for name, row in report.data.get("cases", {}).items():
        if not row["tiles"]:
            continue
        shipped = next((us for tile, us in row["tiles"] if tile is None), math.nan)
        best = min(us for _, us in row["tiles"])
        parts = dict.fromkeys(("write", "eager", "host", "plan", "apart"), math.nan) | row.get("parts", {})
        print(
            f"{name:22} {row['limit']:7.1f} {shipped:8.1f} {best:8.1f} {row['limit'] / best:8.0%} "
            f"{row.get('sdpa') or math.nan:8.1f} {parts['apart']:7.1f} {parts['write']:6.1f} "
            f"{parts['eager']:7.1f} {parts['host']:6.1f} {parts['plan']:6.1f}"
        )
    print(f"{len(report.data['failures'])} failures", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=48, help="random shapes to check")
    parser.add_argument("--cases", default=";".join(CASES), help="cases to time, separated by semicolons")
    parser.add_argument("--page-size", type=int, help="of the cases that are timed; else each has its own")
    parser.add_argument("--processes", type=int, default=min(12, os.cpu_count() or 1), help="that compile")
    parser.add_argument("--budget", type=float, default=135.0, help="seconds after which no more tiles are tried")
    parser.add_argument("--json", type=Path, help="file for all figures")
    arguments = parser.parse_args()
    names = [name.strip() for name in arguments.cases.split(";") if name.strip()]
    if arguments.page_size is not None:
        CASES.update({name: replace(CASES[name], page_size=arguments.page_size) for name in names})
    report = Report(arguments.budget)
    report.data |= {"torch": torch.__version__, "triton": triton.__version__}
    report.data["device"] = torch.cuda.get_device_name()
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:  # ended, not waited for
        run_checks(report, pool, arguments.shapes)
        usable = compiled(report, pool, names)
    try:
        run_timings(report, usable)
    except Exception as error:
        report.failed("timings", error)
    print_summary(report)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report.data), encoding="utf-8")


if __name__ == "__main__":
    main()
