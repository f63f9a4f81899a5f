"""Traps of a repository with several source roots."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCE_ROOTS = [root for root in CONFIG["tool"]["hatch"]["build"]["dev-mode-dirs"] if root != "src"]


def test_source_roots_are_no_packages() -> None:
    """With the repository on `sys.path`, `import schedulers` would make every class exist twice."""
    for root in ["src", *SOURCE_ROOTS]:
        assert not (ROOT / root / "__init__.py").exists()
    assert "--import-mode=importlib" in CONFIG["tool"]["pytest"]["ini_options"]["addopts"]


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_importing_a_source_root_is_banned(root: str) -> None:
    banned = CONFIG["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    assert root in banned
    assert "TID" in CONFIG["tool"]["ruff"]["lint"]["select"]


def test_the_repository_is_not_on_the_path_of_an_installed_llmkit(site: Any) -> None:
    result = site.run(f"""
        import sys, llmkit.registry
        registry = llmkit.registry.Registry.discover()
        policies = [registry.load("scheduler", row.name).front_door for row in registry.find("scheduler")]
        print(sorted(name for name in sys.modules if name.split(".")[0] in {SOURCE_ROOTS}))
    """)
    assert result.stdout.strip() == "[]", result.stderr


def test_everything_in_a_source_root_has_our_name() -> None:
    """A stray module in a source root becomes importable by everyone."""
    for root in ["src", *SOURCE_ROOTS]:
        names = {path.name for path in (ROOT / root).iterdir() if path.name != "__pycache__"}
        assert {name for name in names if not name.startswith("llmkit")} == set()


def test_the_import_contracts_know_every_package() -> None:
    """A package that is forgotten in them may import the others, and be imported by the core, unnoticed."""
    packages = {Path(path).name for path in CONFIG["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    settings = CONFIG["tool"]["importlinter"]
    core, independence, _ = settings["contracts"]
    assert set(settings["root_packages"]) == packages
    assert set(core["forbidden_modules"]) == set(independence["modules"]) == packages - {"llmkit"}
