"""Doctor: found, selected, loadable, usable here, and if not, why and what to install."""

from __future__ import annotations

from typing import Any

import pytest

from llmkit.config import PluginsConfig
from llmkit.registry import DoctorRow, Registry, loading

GROUP = "llmkit.schedulers"


@pytest.fixture
def rows(site: Any, cpu: Any) -> dict[str, DoctorRow]:
    site.add_policy("healthy", "'is well'")
    site.add_policy("needy", "'x', requires=('no-such-library',), extra='fast'")
    site.add_policy("gpu_only", body="@hookimpl\ndef llmkit_problems(environment): return ['it needs CUDA']\n")
    site.add_module("broken", "raise SystemExit(1)")
    site.add_module("slow", "import threading\nthreading.Event().wait(60)")
    points = {name: name for name in ("healthy", "needy", "gpu_only", "broken", "slow")}
    site.add_distribution("llmkit-sick", {GROUP: points | {"off": "healthy", "shared": "healthy"}})
    site.add_distribution("llmkit-old", {GROUP: {"old": "healthy"}}, requires=["llmkit<0.0.1"])
    site.add_distribution("llmkit-also", {GROUP: {"shared": "healthy"}})
    registry = Registry.discover(PluginsConfig(disable=("scheduler:off",)))
    choices = {"scheduler": "needy", "attention": "nothing", "extension": ("ghost",), "connector": None}
    found = registry.doctor(cpu, choices, import_timeout=0.2)
    return {f"{row.kind}:{row.name}": row for row in found if row.distribution != "llmkit"}


def verdict(row: DoctorRow) -> tuple[bool, bool, bool, bool]:
    return (row.found, row.selected, row.loadable, row.usable)


def test_healthy(rows: dict[str, DoctorRow]) -> None:
    row = rows["scheduler:healthy"]
    assert verdict(row) == (True, False, True, True)
    assert (row.summary, row.reasons, row.distribution, row.version) == ("is well", (), "llmkit-sick", "1.0")
    assert row.import_seconds is not None


def test_missing_library(rows: dict[str, DoctorRow]) -> None:
    row = rows["scheduler:needy"]
    assert verdict(row) == (True, True, True, False)
    assert row.reasons == ("it needs no-such-library, which is not installed",)
    assert row.hint == "Install it with: pip install 'no-such-library' (the extra llmkit-sick[fast])."


@pytest.mark.parametrize(
    ("body", "reasons"),
    [
        ("return ['it needs CUDA'] if environment.device_type == 'cpu' else []", ("it needs CUDA",)),
        ("return [] if environment.has_module('no_such_library') else ['no library']", ()),
        ("import no_such_library", ()),
    ],
)
def test_what_the_machine_lacks_comes_before_missing_libraries(
    site: Any, cpu: Any, body: str, reasons: tuple[str, ...]
) -> None:
    hook = f"@hookimpl\ndef llmkit_problems(environment):\n    {body}\n"
    site.add_policy("lacking", "'x', requires=('no-such-library',)", body=hook)
    site.add_distribution("llmkit-lacking", {GROUP: {"lacking": "lacking"}})
    rows = Registry.discover().doctor(cpu, {})
    (row,) = (row for row in rows if row.name == "lacking")
    assert row.reasons == (*reasons, "it needs no-such-library, which is not installed")
    assert row.hint == "Install it with: pip install 'no-such-library'."


@pytest.mark.parametrize("name", ["attention:triton", "attention:flash_attn", "kernels:triton", "quantization:fp8"])
def test_plugins_for_gpus_say_so_first_where_their_libraries_are_missing(
    monkeypatch: pytest.MonkeyPatch, cpu: Any, name: str
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(loading, "missing_requirements", lambda requires: [f"it needs {each}" for each in requires])
    (row,) = (row for row in Registry.discover().doctor(cpu, {}) if f"{row.kind}:{row.name}" == name)
    device, *libraries = row.reasons
    assert "needs a CUDA GPU" in device
    assert libraries
    assert all(library.startswith("it needs") for library in libraries)
    assert "pip install" in (row.hint or "")


def test_wrong_machine(rows: dict[str, DoctorRow]) -> None:
    assert verdict(rows["scheduler:gpu_only"]) == (True, False, True, False)
    assert rows["scheduler:gpu_only"].reasons == ("it needs CUDA",)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("broken", "importing broken failed: SystemExit: 1"),
        ("slow", "importing slow did not finish within 0.2 seconds"),
        ("old", "it requires llmkit<0.0.1"),
        ("off", "it is disabled by plugins.disable"),
    ],
)
def test_not_loadable(rows: dict[str, DoctorRow], name: str, reason: str) -> None:
    row = rows[f"scheduler:{name}"]
    assert verdict(row) == (True, False, False, False)
    assert reason in row.reasons[0]


def test_conflict(rows: dict[str, DoctorRow]) -> None:
    row = rows["scheduler:shared"]
    assert verdict(row) == (True, False, True, False)
    assert "offered more than once" in row.reasons[0]
    assert row.hint in ("Choose it as llmkit-sick:shared.", "Choose it as llmkit-also:shared.")


def test_choice_that_does_not_exist(rows: dict[str, DoctorRow]) -> None:
    for name in ("attention:nothing", "extension:ghost"):
        assert verdict(rows[name]) == (False, True, False, False)
        assert "There is no" in rows[name].reasons[0]


@pytest.mark.usefixtures("site")
def test_auto_marks_what_it_would_take(cpu: Any) -> None:
    rows = Registry.discover().doctor(cpu, {"scheduler": "auto"})
    (selected,) = [row for row in rows if row.selected]
    assert (selected.kind, selected.usable) == ("scheduler", True)
