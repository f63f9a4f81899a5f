"""A folder on `sys.path` that plays site-packages: hand-made distributions and modules."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from llmkit.hookspecs.plugin import Environment


@dataclass
class Site:
    """`add_distribution` writes a dist-info folder, `add_module` a module; `run` starts Python that finds them."""

    root: Path
    modules: set[str] = field(default_factory=set)

    def add_distribution(
        self,
        name: str,
        entry_points: Mapping[str, Mapping[str, str]],
        version: str = "1.0",
        requires: Sequence[str] = (),
        metadata: str | None = None,
    ) -> Path:
        folder = self.root / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {line}" for line in requires]
        (folder / "METADATA").write_text("\n".join(lines) + "\n" if metadata is None else metadata)
        points: list[str] = []
        for group, pairs in entry_points.items():
            points += [f"[{group}]", *(f"{key} = {value}" for key, value in pairs.items())]
        (folder / "entry_points.txt").write_text("\n".join(points) + "\n")
        importlib.invalidate_caches()
        return folder

    def add_module(self, name: str, source: str) -> None:
        (self.root / f"{name}.py").write_text(textwrap.dedent(source))
        self.modules.add(name)
        importlib.invalidate_caches()

    def add_policy(self, module: str, info: str = "summary='a policy'", body: str = "", before: str = "") -> None:
        """A working scheduler plugin; `before` and `body` are code around it. Its policy says `made_by` module."""
        source = POLICY.format(module=module, info=info)
        self.add_module(module, textwrap.dedent(before) + source + textwrap.dedent(body))

    def run(self, code: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run `code` in a fresh interpreter that has this folder on its path."""
        variables = {**os.environ, "PYTHONPATH": str(self.root), **environ}
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], env=variables, capture_output=True, text=True, timeout=120
        )


POLICY = """\
from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.hookspecs.scheduler import SchedulerPolicy

info = PluginInfo({info})

class Policy(SchedulerPolicy):
    made_by = "{module}"
    def __init__(self, options=None): self.options = options
    def add(self, request): pass
    def peek(self): return None
    def pop(self): raise IndexError
    def remove(self, request): pass
    def __len__(self): return 0

@hookimpl
def llmkit_scheduler_policy(options):
    return Policy(options)
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    root = tmp_path / "site"
    root.mkdir()
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.delenv("LLMKIT_DISABLE_PLUGINS", raising=False)
    monkeypatch.setenv("LLMKIT_CACHE", str(tmp_path / "cache"))
    made = Site(root)
    yield made
    for name in made.modules:
        sys.modules.pop(name, None)


@pytest.fixture
def cpu() -> Environment:
    return Environment(device_type="cpu")
