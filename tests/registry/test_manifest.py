"""Child processes find the same plugins again, or stop (case B78)."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from llmkit.config import PluginsConfig
from llmkit.errors import PluginError
from llmkit.hookspecs import Environment, PluginInfo, hookimpl
from llmkit.registry import Manifest, Registry
from llmkit.registry.manifest import importable_name

GROUP = "llmkit.schedulers"

WRITES_PID = """
import os
from pathlib import Path

def note(folder):
    with open(Path(folder) / "pids", "a") as file:
        file.write(f"{os.getpid()}\\n")
"""

NOTING_HOOK = """
@hookimpl
def llmkit_scheduler_policy(options):
    note(os.environ["PID_FOLDER"])
    return Policy(options)
"""


def use(registry: Registry) -> None:
    registry.create("scheduler", "noting", Environment())


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_plugin_is_built_once_in_parent_and_once_in_child(
    site: Any, tmp_path: Path, monkeypatch: Any, method: str
) -> None:
    site.add_policy("noting", before=WRITES_PID, body=NOTING_HOOK)
    site.add_distribution("llmkit-noting", {GROUP: {"noting": "noting"}})
    monkeypatch.setenv("PID_FOLDER", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(site.root))
    registry = Registry.discover()
    use(registry)
    # As the engine does, the registry crosses the border as its manifest, also where fork would let it be inherited.
    process = multiprocessing.get_context(method).Process(target=use_pickled, args=(pickle.dumps(registry),))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert pids == [os.getpid(), process.pid]


def use_pickled(data: bytes) -> None:
    use(pickle.loads(data))


def test_manifest_survives_json_and_keeps_the_settings(site: Any, cpu: Any) -> None:
    site.add_policy("kept")
    site.add_distribution("llmkit-kept", {GROUP: {"kept": "kept"}})
    registry = Registry.discover(PluginsConfig(auto="any", disable=("scheduler:priority",)))
    manifest = Manifest.from_dict(json.loads(json.dumps(registry.manifest().to_dict())))
    assert manifest == registry.manifest()
    child = Registry.from_manifest(manifest)
    assert child.find() == registry.find()
    assert child.create("scheduler", "kept", cpu).made_by == "kept"
    with pytest.raises(PluginError, match="disabled"):
        child.create("scheduler", "priority", cpu)


def test_child_stops_when_a_plugin_is_missing_or_another_version(site: Any) -> None:
    folder = site.add_distribution("llmkit-moving", {GROUP: {"moving": "moving"}}, version="1.0")
    manifest = Registry.discover().manifest()
    shutil.rmtree(folder)
    with pytest.raises(PluginError, match=r"'moving' of llmkit-moving 1\.0 .*is not installed here"):
        Registry.from_manifest(manifest)
    site.add_distribution("llmkit-moving", {GROUP: {"moving": "moving"}}, version="1.1")
    with pytest.raises(PluginError, match=r"is version 1\.1 .*here"):
        Registry.from_manifest(manifest)


def test_plugin_that_the_parent_does_not_know_is_left_out(site: Any) -> None:
    manifest = Registry.discover().manifest()
    site.add_distribution("llmkit-new", {GROUP: {"new": "new"}})
    assert "new" not in {row.name for row in Registry.from_manifest(manifest).find()}


def test_registered_plugins_travel_by_their_import_name(site: Any, cpu: Any) -> None:
    site.add_policy("registered")
    import registered

    registry = Registry.discover()
    registry.register("scheduler", "mine", registered)
    child = pickle.loads(pickle.dumps(registry))
    assert child.create("scheduler", "mine", cpu).made_by == "registered"


def test_registered_object_without_a_name_stops_the_child() -> None:
    class Local:
        info = PluginInfo("x")

        @hookimpl
        def llmkit_scheduler_policy(self) -> None: ...

    registry = Registry.discover()
    registry.register("scheduler", "local", Local())
    with pytest.raises(PluginError, match="no import can find"):
        Registry.from_manifest(registry.manifest())


def test_importable_names() -> None:
    assert importable_name(json) == "json"
    assert importable_name(Path) == "pathlib:Path"
    assert importable_name(object()) == ""
