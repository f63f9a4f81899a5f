"""Listing plugins reads metadata and imports nothing; odd metadata is a warning."""

from __future__ import annotations

import json
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from llmkit.config import PluginsConfig
from llmkit.errors import ConfigError, PluginError
from llmkit.hookspecs.kinds import KINDS
from llmkit.registry import Registry, detect_environment
from llmkit.registry.discovery import discover_rows

GROUP = "llmkit.schedulers"
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.mark.usefixtures("site")
def test_built_in_plugins_are_found_with_their_package() -> None:
    rows = Registry.discover().find("scheduler")
    assert {row.name for row in rows} >= {"fcfs", "priority"}
    assert all(row.builtin and row.distribution == "llmkit" and row.state == "found" for row in rows)


def test_listing_imports_no_plugin(site: Any) -> None:
    site.add_distribution("llmkit-evil", {GROUP: {"evil": "evil_policy"}}, version="2.0")
    site.add_module("evil_policy", "raise SystemExit('imported')")
    (row,) = [row for row in Registry.discover().find("scheduler") if row.name == "evil"]
    assert (row.distribution, row.version, row.state, row.builtin) == ("llmkit-evil", "2.0", "found", False)
    assert "evil_policy" not in sys.modules


def test_discovery_remembers_nothing(site: Any) -> None:
    before = Registry.discover()
    site.add_distribution("llmkit-late", {GROUP: {"late": "late_policy"}})
    assert "late" not in {row.name for row in before.find("scheduler")}
    assert "late" in {row.name for row in Registry.discover().find("scheduler")}


def test_thirty_plugins_are_listed_quickly_without_importing_them_or_torch(site: Any) -> None:
    for i in range(30):
        kind = KINDS[i % len(KINDS)]
        requires = ["llmkit>=0.1", "numpy; extra == 'fast'"]
        site.add_distribution(f"llmkit-many-{i}", {kind.group: {f"many{i}": f"many_{i}"}}, requires=requires)
        site.add_module(f"many_{i}", "raise RuntimeError('a listed plugin was imported')")
    result = site.run("""
        import json, sys, time
        from llmkit.registry import Registry
        start = time.perf_counter()
        rows = Registry.discover().find()
        seconds = time.perf_counter() - start
        print(json.dumps({
            "seconds": seconds,
            "third": sum(not row.builtin for row in rows),
            "imported": [name for name in sys.modules if name.startswith(("many_", "torch", "pydantic", "llmkit_"))],
        }))
    """)
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout)
    assert seen["third"] == 30
    assert seen["imported"] == []
    assert seen["seconds"] < 0.5


def test_detecting_the_cpu_does_not_import_torch(site: Any) -> None:
    result = site.run("""
        import sys
        from llmkit.registry import detect_environment
        environment = detect_environment()
        print(environment.device_type, environment.platform == sys.platform, "torch" in sys.modules)
    """)
    assert result.stdout.split() == ["cpu", "True", "False"], result.stderr


def test_environment_of_this_machine() -> None:
    environment = detect_environment("cpu")
    assert environment.compute_capability is None
    assert environment.machine
    assert environment.has_module("json")
    assert not environment.has_module("no_such_module_anywhere")


def test_pyproject_and_installed_metadata_agree() -> None:
    """Entry points freeze at install time: a plugin added to pyproject.toml is invisible until the next install."""
    declared = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"]
    installed: dict[str, dict[str, str]] = {}
    for point in distribution("llmkit").entry_points:
        if point.group != "console_scripts":
            installed.setdefault(point.group, {})[point.name] = point.value
    assert installed == declared, "reinstall llmkit (pip install -e .)"


def test_every_declared_group_is_a_kind() -> None:
    declared = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"]
    assert {group for group in declared if group.startswith("llmkit.")} <= {kind.group for kind in KINDS}


def test_unknown_group_is_a_warning(site: Any) -> None:
    site.add_distribution("llmkit-typo", {"llmkit.scheduler": {"x": "x"}})
    (warning,) = Registry.discover().warnings
    assert "llmkit-typo 1.0" in warning
    assert "llmkit.schedulers" in warning


@pytest.mark.parametrize("text", ["[llmkit.schedulers\nx", "[llmkit.schedulers]\nno equals sign\n", "\udcff"])
def test_malformed_metadata_of_others_is_a_warning(site: Any, text: str) -> None:
    folder = site.add_distribution("llmkit-odd", {})
    (folder / "entry_points.txt").write_bytes(b"llmkit." + text.encode("utf-8", "surrogateescape"))
    registry = Registry.discover()
    assert {row.name for row in registry.find("scheduler")} >= {"fcfs"}


def test_distribution_without_metadata_is_listed(site: Any) -> None:
    site.add_distribution("llmkit-bare", {GROUP: {"bare": "bare"}}, metadata="")
    (row,) = [row for row in Registry.discover().find("scheduler") if row.name == "bare"]
    assert row.distribution == "llmkit-bare"


def test_the_backport_of_the_library_changes_nothing(site: Any) -> None:
    """Whoever imports importlib_metadata replaces what reads metadata for the whole process; it is stricter."""
    pytest.importorskip("importlib_metadata")
    site.add_distribution("llmkit-bare", {GROUP: {"bare": "bare"}}, metadata="")
    points = {"good": "good:door [extra]", "no_reference": "not a module!"}
    site.add_distribution("llmkit-odd", {GROUP: points}, requires=["llmkit>=0.1"])
    code = """
        import importlib_metadata
        from llmkit.registry import Registry
        rows = Registry.discover().find("scheduler")
        print(sorted((row.distribution, row.name, row.value) for row in rows if not row.builtin))
    """
    run = site.run(code)
    assert run.stdout.strip() == str(
        [
            ("llmkit-bare", "bare", "bare"),
            ("llmkit-odd", "good", "good:door [extra]"),
            ("llmkit-odd", "no_reference", "not a module!"),
        ]
    ), run.stderr


def test_stale_egg_info_says_reinstall(site: Any, cpu: Any) -> None:
    """An llmkit.egg-info earlier on the path hides the installed metadata, and with it every plugin."""
    egg = site.root / "llmkit.egg-info"
    egg.mkdir()
    (egg / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: llmkit\nVersion: 0.1.0\n")
    registry = Registry.discover()
    assert registry.find("scheduler") == []
    assert any("reinstall llmkit" in warning and str(site.root) in warning for warning in registry.warnings)
    for choice in ("auto", "fcfs"):
        with pytest.raises(PluginError, match="reinstall llmkit"):
            registry.create("scheduler", choice, cpu)


def test_same_distribution_twice_on_the_path_counts_once(site: Any, tmp_path: Path, monkeypatch: Any) -> None:
    site.add_distribution("llmkit-twice", {GROUP: {"twice": "old"}}, version="1.0")
    newer = type(site)(tmp_path / "newer")
    newer.add_distribution("llmkit-twice", {GROUP: {"twice": "new"}}, version="2.0")
    monkeypatch.syspath_prepend(str(newer.root))
    rows = [row for row in discover_rows().rows if row.name == "twice"]
    assert [(row.version, row.value) for row in rows] == [("2.0", "new")]


def test_reserved_names_are_broken(site: Any) -> None:
    site.add_distribution("llmkit-auto", {GROUP: {"auto": "x"}})
    (row,) = [row for row in Registry.discover().find("scheduler") if row.name == "auto"]
    assert row.state == "broken"


def test_unknown_kind_lists_the_kinds() -> None:
    with pytest.raises(PluginError, match=r"no plugin kind 'schedulr'.*scheduler, attention"):
        Registry.discover().find("schedulr")


# ---- what is switched off


def test_safe_mode_ignores_other_packages(site: Any, cpu: Any) -> None:
    site.add_distribution("llmkit-other", {GROUP: {"other": "other", "fcfs": "other"}})
    registry = Registry.discover(PluginsConfig(safe_mode=True))
    states = {(row.distribution, row.name): row.state for row in registry.find("scheduler")}
    assert states["llmkit-other", "other"] == states["llmkit-other", "fcfs"] == "disabled"
    assert states["llmkit", "fcfs"] == "found"
    with pytest.raises(PluginError, match="safe mode"):
        registry.create("scheduler", "other", cpu)
    with pytest.raises(PluginError, match="safe mode"):
        registry.create("scheduler", "json:dumps", cpu)


@pytest.mark.usefixtures("site")
def test_plugins_are_disabled_by_variable_and_configuration(cpu: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("LLMKIT_DISABLE_PLUGINS", "scheduler:priority, scheduler:missing")
    registry = Registry.discover(PluginsConfig(disable=("model:llmkit:LlamaForCausalLM",)))
    states = {row.name: row.state for row in registry.find()}
    assert states["priority"] == states["LlamaForCausalLM"] == "disabled"
    assert any("no scheduler plugin 'missing' to disable" in warning for warning in registry.warnings)
    with pytest.raises(PluginError, match="disabled by LLMKIT_DISABLE_PLUGINS"):
        registry.create("scheduler", "priority", cpu)
    registry.create("scheduler", "auto", cpu)
    assert registry.selections[-1].rejected["priority"] == "it is disabled by LLMKIT_DISABLE_PLUGINS"


@pytest.mark.parametrize("value", ["priority", "schedulers:fcfs", "scheduler:", "a:b:c:d"])
@pytest.mark.usefixtures("site")
def test_malformed_list_of_disabled_plugins(monkeypatch: Any, value: str) -> None:
    monkeypatch.setenv("LLMKIT_DISABLE_PLUGINS", value)
    with pytest.raises(ConfigError, match="must be kind:name"):
        Registry.discover()


def test_extras_install_what_their_plugins_require() -> None:
    """The hint for a library that is missing names the library; pages name the extra."""
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    registry = Registry.discover()
    rows = [row for kind in KINDS for row in registry.find(kind.name) if row.distribution == "llmkit"]
    plugins = [info for info in (registry.load_row(row).info for row in rows) if info.extra]
    assert len(plugins) >= 8
    for info in plugins:
        name = (info.extra or "").removeprefix("llmkit[").removesuffix("]")
        assert set(info.requires) <= {line.partition(";")[0] for line in extras[name]}, info
