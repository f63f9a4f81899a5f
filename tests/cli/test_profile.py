"""`llmkit profile`, and how a trace is added up."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from llmkit_cli.bench.trace import read_trace, summarised
from llmkit_cli.commands.profile import table
from llmkit_cli.main import main


def event(category: str, name: str, start: float, duration: float, thread: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "tid": thread}


EVENTS = [
    event("user_annotation", "llmkit: plan", 0, 1000),
    event("user_annotation", "llmkit: submit", 1000, 6000),
    event("user_annotation", "llmkit: forward", 2000, 3000),
    event("user_annotation", "llmkit: wait", 8000, 1000),
    event("user_annotation", "llmkit: plan", 9000, 1000),
    event("user_annotation", "llmkit: wait", 19000, 1000),
    event("user_annotation", "someone else's", 0, 99999),
    event("cpu_op", "aten::linear", 2000, 2000),
    event("cpu_op", "aten::mm", 2100, 1500),
    event("cpu_op", "aten::mm", 2100, 700, thread=2),
    event("kernel", "gemm", 4000, 3000),
    event("kernel", "gemm", 6000, 2000),
    event("gpu_memcpy", "copy", 13000, 1000),
]


def test_a_trace_is_added_up():
    summary = summarised(EVENTS)
    assert summary.steps == 2
    assert summary.wall_ms == 20
    assert {name: (share.calls, share.ms) for name, share in summary.parts.items()} == {
        "plan": (2, 2.0), "submit": (1, 3.0), "forward": (1, 3.0), "wait": (2, 2.0),
    }  # fmt: skip
    assert summary.operations["aten::linear"].ms == 0.5
    assert (summary.operations["aten::mm"].calls, summary.operations["aten::mm"].ms) == (2, 2.2)
    assert summary.kernels["gemm"].ms == 5
    assert (summary.device_ms, summary.device_busy_ms) == (10, 5)  # two kernels overlap for a millisecond


def test_the_table():
    lines = [line.split() for line in table(summarised(EVENTS), top=1)]
    assert lines[0] == ["2", "steps,", "10.000", "ms", "each"]
    assert ["submit", "1", "1.500", "15.0%"] in lines
    assert ["between", "parts", "5.000", "50.0%"] in lines
    assert ["device:", "2.500", "ms", "a", "step,", "idle", "50.0%", "of", "the", "time"] in lines
    assert ["gemm", "2", "2.500", "100.0%"] in lines
    assert not any("copy" in line for line in lines), "only one kernel was asked for"


def test_traces_are_read_packed_and_not(tmp_path):
    text = json.dumps({"traceEvents": [*EVENTS, {"ph": "M", "name": "process_name"}]})
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(text.encode()))
    assert read_trace(tmp_path / "a.json") == read_trace(tmp_path / "a.json.gz") == EVENTS


def test_a_run_on_the_cpu(capsys, tmp_path, monkeypatch):
    from llmkit.metrics import step_parts
    from llmkit_cli.bench import shapes, workloads

    tiny = {**shapes.SHAPES["smollm2-135m"], "num_hidden_layers": 1, "vocab_size": 128}
    monkeypatch.setitem(shapes.SHAPES, "tiny", tiny)
    monkeypatch.setattr(workloads, "workload", lambda *_: [workloads.WorkItem([5, 6, 7], 9)] * 2)
    flags = [
        "--shape",
        "tiny",
        "--folder",
        str(tmp_path),
        "--max-tokens",
        "4",
        "--num-blocks",
        "64",
        "--num-threads",
        "1",
    ]
    with pytest.raises(SystemExit) as ended:
        main(["profile", *flags, "--dtype", "float32", "--json"])
    output = capsys.readouterr()
    assert not ended.value.code, output.err
    result = json.loads(output.out)
    assert result["steps"] == 4
    assert {"plan", "submit", "inputs", "forward", "logits", "sample", "wait", "update"} <= result["parts"].keys()
    assert sum(share["ms"] for share in result["parts"].values()) == pytest.approx(result["wall_ms"], rel=0.9)
    assert list(tmp_path.glob("*.trace.json.gz"))
    assert step_parts.part("anything") is step_parts.part("else"), "parts are still recorded"
