"""A server of llmkit's as the benchmarks use it: started, watched, ended."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO

import psutil

START_TIMEOUT_S = 120.0

_ROLES = {"engine.process": "engine", "grammars.compile_server": "compile process"}


@dataclass(frozen=True)
class RunningServer:
    """url: where it listens. process: of the HTTP server, whose children are the engine and its helpers."""

    url: str
    process: psutil.Process

    def engine(self) -> psutil.Process | None:
        """The engine process; None while there is none."""
        for child in self.process.children():
            with suppress(psutil.NoSuchProcess):
                if "engine.process" in " ".join(child.cmdline()):
                    return child
        return None

    def resident_by_process(self) -> dict[str, float]:
        """Resident memory in MiB of the HTTP server, the engine, the process that compiles grammars, and others."""
        found = {"http server": _resident(self.process)}
        for child in self.process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                words = " ".join(child.cmdline())
                name = next((name for mark, name in _ROLES.items() if mark in words), "others")
                found[name] = found.get(name, 0.0) + _resident(child)
        return {name: round(mib, 1) for name, mib in found.items()}

    def resident_mib(self) -> tuple[float, float]:
        """Resident memory of the HTTP server, and of all its children together."""
        children = self.process.children(recursive=True)
        return _resident(self.process), sum(_resident(child) for child in children)


def _resident(process: psutil.Process) -> float:
    try:
        return float(process.memory_info().rss) / 2**20
    except psutil.NoSuchProcess:
        return 0.0


@contextmanager
def llmkit_server(model: str, flags: Sequence[str] = (), *, ends_well: bool = True) -> Iterator[RunningServer]:
    """`llmkit serve` on a free port; ended with SIGTERM. Raises RuntimeError if it does not start or ends badly, unless
    `ends_well` says that it need not."""
    command = [
        sys.executable,
        "-m",
        "llmkit_cli",
        "serve",
        model,
        "--port",
        "0",
        "--no-access-log",
        "--no-log-requests",
        *flags,
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        timer = threading.Timer(START_TIMEOUT_S, child.kill)
        timer.start()
        try:
            url, lines = _address(child.stderr)
            timer.cancel()
            if url is None:
                raise RuntimeError("the server did not start: " + "".join(lines[-5:]))
            reader = threading.Thread(target=_pass_on, args=(child.stderr,), daemon=True)
            reader.start()
            yield RunningServer(url, psutil.Process(child.pid))
        finally:
            timer.cancel()
            child.send_signal(signal.SIGTERM)
            code = child.wait(START_TIMEOUT_S)
    if ends_well and code != 0:
        raise RuntimeError(f"the server ended with code {code}")


def _address(log: IO[str]) -> tuple[str | None, list[str]]:
    lines = []
    for line in log:
        lines.append(line)
        found = re.search(r"^Serving .* at (http\S+)$", line.strip())
        if found is not None:
            return found[1], lines
    return None, lines


def _pass_on(log: IO[str]) -> None:
    """Warnings and errors; a line for each request is too much."""
    with suppress(ValueError):  # closed at the end
        for line in log:
            if " INFO " not in line:
                sys.stderr.write(line)


def what_is_left(after: Mapping[str, float]) -> list[str]:
    """Problems that the load and cache of a server show when nobody asks anything any more."""
    found = []
    if any(after[key] for key in ("server_load", "num_running", "num_waiting", "num_unfinished")):
        found.append("requests are left")
    if after["num_free_blocks"] != after["num_blocks"]:
        found.append("blocks are left")
    return found
