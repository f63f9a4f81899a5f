"""A fresh environment that sees the packages of this one, and ways to install and run things in it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}


class FreshEnvironment:
    """`install` takes a wheel or a source folder; `run` runs Python there, and fails the test if it fails."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        ours = sysconfig.get_paths()["purelib"]
        theirs = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        (theirs / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n", encoding="utf-8")

    def install(self, what: Path) -> None:
        options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "install", *options, str(what)]
        subprocess.run(command, check=True)

    def run(self, *arguments: str, cwd: Path | None = None, **environ: str) -> str:
        env = {**os.environ, "PYTHONWARNINGS": "ignore", **environ}
        done = subprocess.run(
            [str(self.python), *arguments], capture_output=True, text=True, env=env, cwd=cwd or self.folder
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="session")
def tiny_model() -> dict[str, Any]:
    """The config.json of a model that is made up in a moment."""
    return dict(TINY_MODEL)


@pytest.fixture(scope="session")
def fresh_environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], FreshEnvironment]:
    """Makes another one at each call."""
    return lambda: FreshEnvironment(tmp_path_factory.mktemp("environment"))
