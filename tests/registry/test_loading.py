"""One broken plugin (case B76): it is a row until it is chosen, and then an error that says everything."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from llmkit.config import PluginsConfig
from llmkit.errors import PluginError
from llmkit.registry import Registry

GROUP = "llmkit.schedulers"

BROKEN = {
    "import_error": ("import no_such_library_here", "importing .* failed: ModuleNotFoundError: .*no_such_library_here"),
    "exits": ("raise SystemExit(3)", "importing .* failed: SystemExit: 3"),
    "base_exception": ("raise GeneratorExit", "importing .* failed: GeneratorExit"),
    "syntax_error": ("def f(:", "importing .* failed: SyntaxError"),
    "no_info": ("x = 1", "no `info`"),
    "wrong_info": ("info = 'a policy'", "of type str, not PluginInfo"),
    "no_hook": (
        "from llmkit.hookspecs import PluginInfo\ninfo = PluginInfo('x')",
        "implements no llmkit_scheduler_policy",
    ),
    "unmarked": (
        "from llmkit.hookspecs import PluginInfo\ninfo = PluginInfo('x')\ndef llmkit_scheduler_policy(options): ...",
        "llmkit_scheduler_policy is not marked with @hookimpl",
    ),
    "unknown_hook": (
        "from llmkit.hookspecs import PluginInfo, hookimpl\ninfo = PluginInfo('x')\n"
        "@hookimpl\ndef llmkit_scheduler_policy(options): ...\n@hookimpl\ndef llmkit_scheduler_polcy(options): ...",
        "its hooks do not fit: unknown hook 'llmkit_scheduler_polcy'",
    ),
    "half_registered": (
        "from llmkit.hookspecs import PluginInfo, hookimpl\ninfo = PluginInfo('x')\n"
        "@hookimpl\ndef llmkit_problems(environment): return []\n@hookimpl\ndef llmkit_scheduler_policy(nonsense): ...",
        "its hooks do not fit",
    ),
    "lazy_module": (
        "def __getattr__(name): raise OSError(name)",
        "its front door failed when looked at: OSError: info",
    ),
    "bad_options": (
        "from llmkit.hookspecs import PluginInfo, hookimpl\ninfo = PluginInfo('x', options=dict)\n"
        "@hookimpl\ndef llmkit_scheduler_policy(options): ...",
        "must be a pydantic model",
    ),
}


@pytest.fixture
def crowd(site: Any) -> Any:
    """Every kind of broken plugin, and a healthy one."""
    for name, (source, _) in BROKEN.items():
        site.add_module(f"crowd_{name}", source)
    site.add_policy("crowd_healthy")
    points = {name: f"crowd_{name}" for name in BROKEN}
    points |= {"healthy": "crowd_healthy", "no_attribute": "crowd_healthy:door.handle", "no_module": "crowd_absent"}
    points |= {"no_path": "not a module!"}
    site.add_distribution("llmkit-crowd", {GROUP: points}, version="3.1")
    return site


@pytest.mark.parametrize("name", [*BROKEN, "no_attribute", "no_module"])
@pytest.mark.usefixtures("crowd")
def test_chosen_broken_plugin_names_package_version_and_reason(cpu: Any, name: str) -> None:
    registry = Registry.discover()
    reasons = {"no_attribute": "has no attribute 'door.handle'", "no_module": "No module named 'crowd_absent'"}
    pattern = BROKEN[name][1] if name in BROKEN else reasons[name]
    with pytest.raises(PluginError, match=pattern) as caught:
        registry.create("scheduler", name, cpu)
    assert f"scheduler plugin '{name}' (llmkit-crowd 3.1)" in caught.value.message
    assert "pip install --force-reinstall llmkit-crowd" in (caught.value.hint or "")
    (row,) = [row for row in registry.find("scheduler") if row.name == name]
    assert row.state == "broken"
    assert row.reason


@pytest.mark.usefixtures("crowd")
def test_broken_neighbours_do_not_disturb_a_healthy_plugin(cpu: Any) -> None:
    registry = Registry.discover()
    for name in BROKEN:
        with pytest.raises(PluginError):
            registry.load("scheduler", name)
    assert registry.create("scheduler", "healthy", cpu).made_by == "crowd_healthy"
    assert registry.selections[-1].distribution == "llmkit-crowd"
    assert type(registry.create("scheduler", "auto", cpu)).__module__.startswith("llmkit_schedulers")


@pytest.mark.usefixtures("crowd")
def test_half_registered_hooks_are_rolled_back(cpu: Any) -> None:
    """The failed plugin's good hook must not answer when other plugins' hooks are called."""
    registry = Registry.discover()
    with pytest.raises(PluginError):
        registry.load("scheduler", "half_registered")
    healthy = registry.load("scheduler", "healthy")
    assert healthy.manager.get_plugins() == {sys.modules["crowd_healthy"]}
    assert healthy.problems(cpu) == []


def test_failed_import_is_not_repeated(site: Any) -> None:
    site.add_module("counted", "import builtins\nbuiltins.counted_imports += 1\nraise ValueError('no')")
    site.add_distribution("llmkit-counted", {GROUP: {"counted": "counted"}})
    import builtins

    builtins.counted_imports = 0  # type: ignore[attr-defined]
    registry = Registry.discover()
    for _ in range(3):
        with pytest.raises(PluginError, match="ValueError: no"):
            registry.load("scheduler", "counted")
    assert vars(builtins).pop("counted_imports") == 1


def test_interrupt_while_importing_is_let_through(site: Any) -> None:
    site.add_module("interrupted", "raise KeyboardInterrupt")
    site.add_distribution("llmkit-int", {GROUP: {"interrupted": "interrupted"}})
    with pytest.raises(KeyboardInterrupt):
        Registry.discover().load("scheduler", "interrupted")


@pytest.mark.usefixtures("crowd")
def test_strict_mode_refuses_to_start(cpu: Any) -> None:
    registry = Registry.discover(PluginsConfig(strict=True))
    with pytest.raises(PluginError, match=r"plugins\.strict is set.*'exits' \(llmkit-crowd 3\.1\).*SystemExit"):
        registry.create("scheduler", "healthy", cpu)


def test_strict_mode_is_content_with_healthy_plugins(site: Any, cpu: Any) -> None:
    site.add_policy("needy", "'x', requires=('no-such-library',)")
    site.add_distribution("llmkit-needy", {GROUP: {"needy": "needy"}})
    others = tuple(f"{row.kind}:{row.name}" for row in Registry.discover().find() if row.kind != "scheduler")
    registry = Registry.discover(PluginsConfig(strict=True, disable=others))
    registry.create("scheduler", "auto", cpu)
    assert [selection.distribution for selection in registry.selections] == ["llmkit"]


def test_import_that_does_not_end_is_given_up(site: Any) -> None:
    site.add_module("endless", "import threading\nthreading.Event().wait(60)")
    site.add_distribution("llmkit-endless", {GROUP: {"endless": "endless"}})
    registry = Registry.discover()
    row = registry.resolve("scheduler", "endless")
    with pytest.raises(PluginError, match=r"did not finish within 0\.05 seconds"):
        registry.load_row(row, timeout=0.05)


def test_start_is_not_held_up_by_a_sleeping_plugin(site: Any) -> None:
    site.add_module("sleeper", "import time\ntime.sleep(60)")
    site.add_module("exiter", "raise SystemExit(7)")
    site.add_distribution("llmkit-b76", {GROUP: {"sleeper": "sleeper", "exiter": "exiter"}})
    result = site.run("""
        from llmkit.hookspecs import Environment
        from llmkit.registry import Registry
        registry = Registry.discover()
        print(type(registry.create("scheduler", "auto", Environment())).__name__)
        print(sorted(row.name for row in registry.find("scheduler") if not row.builtin))
    """)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[1] == "['exiter', 'sleeper']"


# ---- front doors


def test_module_and_attribute_are_accepted_in_metadata_and_as_a_choice(site: Any, cpu: Any) -> None:
    site.add_policy(
        "doors",
        body="""
        class Door:
            info = PluginInfo("a class")

            @hookimpl
            def llmkit_scheduler_policy(self):
                return Policy("from a class")

        instance = Door()
    """,
    )
    site.add_distribution("llmkit-doors", {GROUP: {"by_class": "doors:Door"}})
    registry = Registry.discover()
    for choice in ("by_class", "doors:Door", "doors:instance"):
        assert registry.create("scheduler", choice, cpu).options == "from a class"
    selection = registry.selections[-1]
    assert (selection.name, selection.distribution) == ("doors:instance", "module")


@pytest.mark.usefixtures("site")
def test_choice_by_path_that_does_not_exist(cpu: Any) -> None:
    registry = Registry.discover()
    with pytest.raises(PluginError, match="has no attribute 'nothing'"):
        registry.create("scheduler", "json:nothing", cpu)
    with pytest.raises(PluginError, match="no scheduler plugin 'no_such_module:x'"):
        registry.create("scheduler", "no_such_module:x", cpu)


def test_hook_may_take_fewer_arguments(site: Any, cpu: Any) -> None:
    site.add_policy(
        "fewer",
        body="""
        @hookimpl
        def llmkit_scheduler_policy():
            return Policy("no arguments")
    """,
    )
    site.add_distribution("llmkit-fewer", {GROUP: {"fewer": "fewer"}})
    assert Registry.discover().create("scheduler", "fewer", cpu).options == "no arguments"


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ("raise RuntimeError('no luck')", "llmkit_scheduler_policy failed: RuntimeError: no luck"),
        ("raise SystemExit(1)", "llmkit_scheduler_policy failed: SystemExit: 1"),
        ("return {}", "returned a dict where a SchedulerPolicy is expected"),
        ("return None", "returned a NoneType where a SchedulerPolicy is expected"),
    ],
)
def test_failing_factory(site: Any, cpu: Any, body: str, pattern: str) -> None:
    site.add_policy("factory", body=f"@hookimpl\ndef llmkit_scheduler_policy():\n    {body}\n")
    site.add_distribution("llmkit-factory", {GROUP: {"factory": "factory"}})
    with pytest.raises(PluginError, match=pattern):
        Registry.discover().create("scheduler", "factory", cpu)


def test_errors_raised_on_purpose_pass(site: Any, cpu: Any) -> None:
    from llmkit.errors import ModelError

    site.add_policy(
        "deliberate",
        body="""
        from llmkit.errors import ModelError

        @hookimpl
        def llmkit_scheduler_policy():
            raise ModelError("this model is not supported")
    """,
    )
    site.add_distribution("llmkit-deliberate", {GROUP: {"deliberate": "deliberate"}})
    with pytest.raises(ModelError, match="not supported"):
        Registry.discover().create("scheduler", "deliberate", cpu)


def test_deprecated_hooks_and_warnings_as_errors_do_not_crash_the_caller(site: Any) -> None:
    site.add_module("warns", "import warnings\nwarnings.warn('old', DeprecationWarning, stacklevel=1)")
    site.add_distribution("llmkit-warns", {GROUP: {"warns": "warns"}})
    with pytest.raises(PluginError, match="DeprecationWarning: old"):
        Registry.discover().load("scheduler", "warns")


def test_wrong_hook_arguments_are_the_callers_mistake(cpu: Any) -> None:
    with pytest.raises(TypeError, match="llmkit_scheduler_policy takes"):
        Registry.discover().create("scheduler", "fcfs", cpu, context=1)


def test_importing_and_building_are_timed(site: Any, cpu: Any) -> None:
    site.add_policy("timed")
    site.add_distribution("llmkit-timed", {GROUP: {"timed": "timed"}})
    registry = Registry.discover()
    assert registry.timings.find("scheduler", "timed") is None
    registry.create("scheduler", "timed", cpu)
    timing = registry.timings.find("scheduler", "timed")
    assert timing is not None
    assert timing.import_seconds is not None
    assert timing.import_seconds > 0
    assert timing.create_seconds is not None
    assert timing.create_seconds > 0
