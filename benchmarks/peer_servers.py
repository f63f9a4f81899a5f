"""Other engines' HTTP servers on a model of their format, started and ended like llmkit's own.

The folder of peers has them where `benchmarks/cpu/README.md` puts them: vLLM for CPUs in an environment of its own, and
llama.cpp's server.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

START_TIMEOUT_S = 180.0
END_TIMEOUT_S = 30.0
POLL_S = 0.1

VLLM_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@contextmanager
def vllm_server(peers: Path, model: Path, flags: Sequence[str] = ()) -> Iterator[str]:
    """The URL of vLLM's server for the folder `model`, up to 32 sequences at once. As a module: `vllm serve` asks for
    the metadata of a package vllm, which the one for CPUs is not. Raises RuntimeError if it does not start."""
    port = _free_port()
    command = [
        *(str(peers / "venv-vllm/bin/python"), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "32"),
        *("--enforce-eager", "--disable-log-stats", "--host", "127.0.0.1", "--port", str(port), *flags),
    ]
    threads = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}"}
    with _running(command, port, {**threads, **VLLM_SETTINGS}) as url:
        yield url


@contextmanager
def llamacpp_server(peers: Path, model: Path, flags: Sequence[str] = ()) -> Iterator[str]:
    """The URL of llama.cpp's server for the file `model`, with 32 slots and separate caches. Raises RuntimeError if it
    does not start; where its AMX code stops with an illegal instruction, that takes the flag -nr."""
    port, threads = _free_port(), str(os.cpu_count() or 1)
    command = [
        *(str(peers / "lcb/build/bin/llama-server"), "-m", str(model), "-t", threads, "-tb", threads),
        *("-np", "32", "-no-kvu", "-c", "40960", "--host", "127.0.0.1", "--port", str(port), *flags),
    ]
    with _running(command, port, {}) as url:
        yield url


@contextmanager
def _running(command: Sequence[str], port: int, environment: Mapping[str, str]) -> Iterator[str]:
    """A server that answers /health; ended with SIGTERM, killed if that does not help."""
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**environment, **os.environ})
        try:
            end = time.monotonic() + START_TIMEOUT_S
            while not _healthy(url):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(max(0, log.seek(0, os.SEEK_END) - 2000))
                    said = log.read().decode(errors="replace")
                    raise RuntimeError(f"{command[0]} did not start (code {process.poll()}): {said}")
                time.sleep(POLL_S)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
