"""Plugins in a fresh process: what their front doors import, whether they load twice, what their factories touch.

`python -m llmkit.testing.conformance.child JOB REPORT`: JOB is a JSON file (`Job`), REPORT gets a line of JSON per
plugin (`ChildReport`). The process ends after the first plugin that spoils it for those that follow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from llmkit.registry import LoadedPlugin, Registry
    from llmkit.testing.conformance.target import Conformance

HEAVY = ("torch", "transformers", "numba", "triton", "jax", "tensorflow", "xgrammar", "outlines_core", "llguidance")
"""Modules that no front door may import: they take from a tenth of a second to several."""

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class ChildReport:
    """One plugin in a fresh process. error: why it could not be loaded there, None if it could. heavy: modules out of
    HEAVY that its front door or `llmkit_problems` imported. built: "built", why its object was not, or None if that was
    not tried; cuda: where code that an import runs has touched CUDA, a stack each."""

    error: str | None = None
    heavy: tuple[str, ...] = ()
    built: str | None = None
    cuda: tuple[str, ...] = ()


def reports(targets: Sequence[Conformance]) -> list[ChildReport]:
    """A report for each plugin. One process does for all of them, unless one spoils it."""
    found: list[ChildReport] = []
    while len(found) < len(targets):
        found += _run(targets[len(found) :])
    return found


def _run(targets: Sequence[Conformance]) -> list[ChildReport]:
    """Reports of the first targets, at least one."""
    job = [[t.registry.manifest().to_dict(), t.kind, t.choice, t.device] for t in targets]
    with tempfile.TemporaryDirectory() as folder:
        job_file, report_file = Path(folder, "job.json"), Path(folder, "report.jsonl")
        job_file.write_text(json.dumps(job), encoding="utf-8")
        report_file.touch()
        command = [sys.executable, "-m", __name__, str(job_file), str(report_file)]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        try:
            done = subprocess.run(
                command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=TIMEOUT_S
            )
            outcome = f"the process ended with code {done.returncode}: {done.stderr.strip()[-2000:]}"
        except subprocess.TimeoutExpired:
            outcome = f"the process did not end within {TIMEOUT_S:g} seconds"
        lines = [json.loads(line) for line in report_file.read_text(encoding="utf-8").splitlines()]
    found = [ChildReport(x["error"], tuple(x["heavy"]), x["built"], tuple(x["cuda"])) for x in lines]
    if not found and len(targets) > 1:
        return _run(targets[:1])  # one of them ended the process, and nobody knows which
    return found or [ChildReport(error=outcome)]


def main(job_file: str, report_file: str) -> None:
    """The child's side."""
    from llmkit.registry import Manifest, Registry, detect_environment

    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    loaded: list[tuple[Registry, LoadedPlugin, str, str, ChildReport]] = []
    for manifest, kind, choice, device in job:
        registry = Registry.from_manifest(Manifest.from_dict(manifest))
        plugin = registry.load(kind, choice)
        plugin.problems(detect_environment())
        heavy = tuple(name for name in HEAVY if name in sys.modules)
        again = Registry.from_manifest(Manifest.from_dict(manifest)).load(kind, choice)
        error = None if again.info == plugin.info else "loaded a second time, it describes itself otherwise"
        loaded.append((registry, plugin, kind, device, ChildReport(error, heavy)))
        if heavy:
            break  # what the next ones import could no longer be told
    with open(report_file, "a", encoding="utf-8") as report:
        for registry, plugin, kind, device, so_far in loaded:
            _write(report, _built(registry, plugin, kind, device, so_far))


def _write(report: TextIO, entry: ChildReport) -> None:
    report.write(json.dumps(asdict(entry)) + "\n")
    report.flush()


def _built(registry: Registry, plugin: LoadedPlugin, kind: str, device: str, so_far: ChildReport) -> ChildReport:
    """`so_far`, and what building the plugin's object does to CUDA."""
    from llmkit.registry import detect_environment
    from llmkit.testing.conformance.target import Conformance

    target = Conformance(kind, plugin.row.qualified, registry, detect_environment(device), plugin)
    touched: list[str] = []
    built = "built"
    if plugin.problems(target.environment):
        return so_far
    with _CudaWatch(touched.append):
        try:
            target.create()
        except Exception as error:
            built = f"{type(error).__name__}: {error}"
    return ChildReport(so_far.error, so_far.heavy, built, tuple(touched))


class _CudaWatch:
    """Tells where code run by an import initialises CUDA. Works without a GPU: it is the attempt that counts."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def __enter__(self) -> None:
        import torch.cuda

        self._original: Callable[[], None] = torch.cuda._lazy_init
        torch.cuda._lazy_init = self._watched

    def __exit__(self, *_: object) -> None:
        import torch.cuda

        torch.cuda._lazy_init = self._original

    def _watched(self) -> None:
        stack = traceback.extract_stack()[:-1]
        imports = [i for i, frame in enumerate(stack) if frame.filename == "<frozen importlib._bootstrap>"]
        if imports:
            self._tell("".join(traceback.format_list(stack[imports[-1] + 1 :])))
        self._original()


if __name__ == "__main__":
    main(*sys.argv[1:])
