"""The wheel holds the packages and nothing else."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_every_top_level_name_starts_with_llmkit(wheel_names):
    assert {name.split("/")[0] for name in wheel_names if not name.startswith("llmkit")} == set()


def test_every_source_package_is_in_the_wheel(wheel_names):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {Path(p).name for p in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    assert packages <= {name.split("/")[0] for name in wheel_names}
    for package in packages:
        assert f"{package}/py.typed" in wheel_names


def test_every_source_root_is_listed():
    """A package that is forgotten in pyproject.toml works in a checkout and is missing from the wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    roots = project["tool"]["hatch"]["build"]["dev-mode-dirs"]
    listed = set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    found = {f"{root}/{init.parent.name}" for root in roots for init in (ROOT / root).glob("*/__init__.py")}
    assert found == listed


def test_source_roots_hold_nothing_but_packages():
    """A stray module in a source root would become importable under its bare name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for root in project["tool"]["hatch"]["build"]["dev-mode-dirs"]:
        names = {entry.name for entry in (ROOT / root).iterdir() if entry.name != "__pycache__"}
        assert all(name.startswith("llmkit") for name in names), (root, names)


def test_data_files_are_in_the_wheel(wheel_names):
    assert "llmkit_cli/bench/workloads.json" in wheel_names
    templates = {path.relative_to(ROOT / "cli").as_posix() for path in (ROOT / "cli").glob("**/*.jinja")}
    assert len(templates) > 30
    assert templates <= set(wheel_names)
