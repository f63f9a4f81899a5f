"""What the drivers share: one JSON request a line on standard input, one JSON answer a line on standard output.

A driver is started once and asked for workloads by name, so that engines can take turns. `{"workload": NAME}` is
answered by a dictionary of figures. No import of llmkit: the drivers of peers run in environments of their own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORKLOADS = Path(__file__).resolve().parents[2] / "cli" / "llmkit_cli" / "bench" / "workloads.json"
RECORDED = {
    "decode-128": "a_decode",
    "prefill-1024": "b_prefill",
    "mixed-32": "c_offline",
    "prefix-768": "d_prefix",
    "start-32": "e_start",
}
STREAMED = ("decode-128", "prefill-1024")

Request = dict[str, Any]  # {"prompt": [ids], "max_tokens": n}


def requests_of(name: str) -> list[Request]:
    return list(json.loads(WORKLOADS.read_text(encoding="utf-8"))[RECORDED[name]])


def figures_of_stream(request: Request, times: list[float]) -> dict[str, float]:
    """times[0]: submitted; times[i]: the i-th token was there (perf_counter seconds)."""
    assert len(times) == request["max_tokens"] + 1, (len(times), request["max_tokens"])
    figures = {"prefill_tok_s": len(request["prompt"]) / (times[1] - times[0])}
    if len(times) > 2:
        figures["decode_tok_s"] = (len(times) - 2) / (times[-1] - times[1])
    return figures


def figures_of_batch(requests: list[Request], counts: list[int], seconds: float) -> dict[str, float]:
    assert counts == [request["max_tokens"] for request in requests], counts
    produced, read = sum(counts), sum(len(request["prompt"]) for request in requests)
    return {"output_tok_s": produced / seconds, "total_tok_s": (produced + read) / seconds}


def peak_resident_mib(pid: int | str = "self") -> float:
    """Peak resident memory (VmHWM) of a process and its descendants, summed, in MiB."""
    total = 0
    for process in [pid, *_descendants(pid)]:
        try:
            lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return total / 1024


def _descendants(pid: int | str) -> list[int]:
    root = os.getpid() if pid == "self" else int(pid)
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
    found, frontier = [], [root]
    while frontier:
        children = [child for child, parent in parents.items() if parent in frontier]
        found += children
        frontier = children
    return found


def serve(
    stream: Callable[[list[int], int], list[float]],
    batch: Callable[[list[Request]], list[int]],
    reset: Callable[[], None],
    version: str,
) -> None:
    """Answer requests until standard input ends. `stream` and `batch` run one workload on the engine."""
    out = sys.stdout
    sys.stdout = sys.stderr  # engines print; the protocol keeps standard output for itself
    out.write(json.dumps({"ready": version}) + "\n")
    out.flush()
    for line in sys.stdin:
        name = json.loads(line)["workload"]
        requests = requests_of(name)
        reset()
        if name in STREAMED:
            figures = figures_of_stream(requests[0], stream(requests[0]["prompt"], requests[0]["max_tokens"]))
        else:
            start = time.perf_counter()
            counts = batch(requests)
            figures = figures_of_batch(requests, counts, time.perf_counter() - start)
        out.write(json.dumps({**figures, "peak_resident_mib": peak_resident_mib()}) + "\n")
        out.flush()


def first_token() -> None:
    """Say that the first token is there, with the peak memory so far; for `--start-only`."""
    print(json.dumps({"first_token": True, "peak_resident_mib": peak_resident_mib()}), flush=True)
