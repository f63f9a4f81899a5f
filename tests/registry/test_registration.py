"""Registration from Python: for embedding and for tests."""

from __future__ import annotations

import types
from typing import Any

import pytest

from llmkit.config import PluginsConfig
from llmkit.errors import PluginError
from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.hookspecs.scheduler import RequestView, SchedulerPolicy
from llmkit.registry import Registry


class Nobody(SchedulerPolicy):
    """Lets nobody in."""

    def add(self, request: RequestView) -> None: ...
    def peek(self) -> RequestView | None:
        return None

    def pop(self) -> RequestView:
        raise IndexError

    def remove(self, request: RequestView) -> None: ...
    def __len__(self) -> int:
        return 0


class Door:
    """A front door as a class."""

    info = PluginInfo("lets nobody in")

    @hookimpl
    def llmkit_scheduler_policy(self) -> SchedulerPolicy:
        return Nobody()


class DoorWithoutHook:
    info = PluginInfo("does nothing")


def test_registered_plugin_is_chosen_by_name(cpu: Any) -> None:
    registry = Registry.discover()
    registry.register("scheduler", "nobody", Door)
    assert isinstance(registry.create("scheduler", "nobody", cpu), Nobody)
    assert registry.selections[-1].distribution == "python"
    registry.unregister("scheduler", "nobody")
    with pytest.raises(PluginError, match="no scheduler plugin 'nobody'"):
        registry.create("scheduler", "nobody", cpu)
    with pytest.raises(PluginError, match="No scheduler plugin 'nobody' is registered"):
        registry.unregister("scheduler", "nobody")


def test_objects_and_modules_are_front_doors(cpu: Any) -> None:
    registry = Registry.discover()
    module = types.ModuleType("a_front_door")
    module.info = PluginInfo("a module")  # type: ignore[attr-defined]
    module.llmkit_scheduler_policy = Door().llmkit_scheduler_policy  # type: ignore[attr-defined]
    for name, door in (("object", Door()), ("module", module)):
        registry.register("scheduler", name, door)
        assert isinstance(registry.create("scheduler", name, cpu), Nobody)


def test_refused_registration_leaves_nothing() -> None:
    registry = Registry.discover()
    for name in ("auto", "a:b", ""):
        with pytest.raises(PluginError, match="reserved"):
            registry.register("scheduler", name, Door)
    with pytest.raises(PluginError, match="implements no llmkit_scheduler_policy"):
        registry.register("scheduler", "nobody", DoorWithoutHook)
    with pytest.raises(PluginError, match="no plugin kind"):
        registry.register("policy", "nobody", Door)
    assert "nobody" not in {row.name for row in registry.find("scheduler")}
    registry.register("scheduler", "nobody", Door)
    with pytest.raises(PluginError, match="registered from Python already"):
        registry.register("scheduler", "nobody", Door)


def test_registered_name_in_conflict_with_an_installed_one(cpu: Any) -> None:
    registry = Registry.discover()
    registry.register("scheduler", "fcfs", Door)
    with pytest.raises(PluginError, match=r"offered more than once.*registered from Python"):
        registry.create("scheduler", "fcfs", cpu)
    assert isinstance(registry.create("scheduler", "python:fcfs", cpu), Nobody)


def test_safe_mode_keeps_what_the_program_registers(cpu: Any) -> None:
    registry = Registry.discover(PluginsConfig(safe_mode=True))
    registry.register("scheduler", "nobody", Door)
    assert isinstance(registry.create("scheduler", "nobody", cpu), Nobody)


def test_auto_does_not_take_what_was_registered(cpu: Any) -> None:
    registry = Registry.discover()
    registry.register("scheduler", "nobody", Door)
    assert not isinstance(registry.create("scheduler", "auto", cpu), Nobody)
    assert "python:nobody" in registry.selections[-1].rejected
