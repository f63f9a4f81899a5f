"""The code in README and documentation runs as it stands there, with the real model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FRANCE = "The capital of France is"

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("smollm2_gguf")]


def code_blocks(page: str, language: str = "python") -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run(arguments: list[str], folder: Path) -> str:
    """Run Python in `folder`, with the modules that lie there; its output."""
    env = {**os.environ, "PYTHONPATH": str(folder), "LLMKIT_NUM_BLOCKS": "256", "LLMKIT_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_python_of_the_readme(tmp_path):
    first, plugin = code_blocks("README.md")
    assert run(["-c", first], tmp_path).startswith(" Paris")
    assert plugin.startswith("# shortest_first.py\n")
    assert len([line for line in plugin.splitlines() if line and not line.startswith("#")]) <= 25
    (tmp_path / "shortest_first.py").write_text(plugin, encoding="utf-8")
    flags = ["--model", "smollm2-135m-instruct", "--temperature", "0", "--max-tokens", "4", "--dtype", "float32"]
    (scheduler,) = re.findall(r"--scheduler (shortest_first\S*)", (ROOT / "README.md").read_text(encoding="utf-8"))
    out = run(["-m", "llmkit_cli", "generate", "--scheduler", scheduler.rstrip("`"), *flags, FRANCE], tmp_path)
    assert out.startswith(" Paris.")


def test_the_plugin_of_the_readme_passes_the_conformance_suite(tmp_path):
    (tmp_path / "shortest_first.py").write_text(code_blocks("README.md")[1], encoding="utf-8")
    check = "from llmkit.testing.scheduling import check_policy\nfrom shortest_first import ShortestFirst\n"
    run(["-c", check + "check_policy(ShortestFirst)"], tmp_path)


def test_python_of_getting_started(tmp_path):
    (block,) = code_blocks("docs/getting-started.md")
    assert run(["-c", block], tmp_path).strip()
