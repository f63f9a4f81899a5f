"""Import a plugin's front door and check that it is one."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from time import perf_counter
from types import ModuleType
from typing import Any

import pluggy

from llmkit.errors import LlmkitError
from llmkit.hookspecs import plugin as common_hooks
from llmkit.hookspecs.kinds import KINDS, PluginKind, kind_named
from llmkit.hookspecs.markers import PROJECT_NAME
from llmkit.hookspecs.plugin import Environment, PluginInfo
from llmkit.registry.compatibility import install_hint, missing_requirements
from llmkit.registry.rows import PluginRow


class LoadFailure(Exception):
    """Why a front door cannot be used; becomes a PluginError once the plugin's name and package are added."""


class NoFrontDoor(LoadFailure):
    """The module is there and does not have the attribute."""


@dataclass(frozen=True)
class LoadedPlugin:
    """A plugin whose front door has been imported and checked. `manager` has this plugin alone registered, so calling a
    hook asks nobody else, and a plugin that fails its checks leaves nothing behind."""

    row: PluginRow
    info: PluginInfo
    front_door: Any
    manager: pluggy.PluginManager

    @property
    def kind(self) -> PluginKind:
        return kind_named(self.row.kind)

    def implements(self, hook: str) -> bool:
        """Whether the front door has an implementation of the hook called `hook`."""
        return bool(getattr(self.manager.hook, hook).get_hookimpls())

    def ask(self, hook: str, **arguments: Any) -> Any:
        """What the plugin answers to one of its kind's optional hooks; None if it does not implement it.

        Raises PluginError if it fails; errors that llmkit raises on purpose, such as ModelError, pass."""
        try:
            return getattr(self.manager.hook, hook)(**arguments)
        except (LlmkitError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise self.row.error(f"its {hook} failed: {described(error)}") from error

    def problems(self, environment: Environment) -> list[str]:
        """Why it cannot work in `environment`: what the plugin itself says, then missing requirements. Where these are
        missing, the plugin is asked as if it had them: that it needs a GPU is to be known before they are installed."""
        missing = missing_requirements(self.info.requires)
        answers: list[Any] = []
        try:
            answers = self.manager.hook.llmkit_problems(
                environment=_WithLibraries(**vars(environment)) if missing else environment
            )
        except (Exception, SystemExit) as error:
            return missing or [f"its llmkit_problems failed: {described(error)}"]
        return [str(problem).rstrip(".") for answer in answers for problem in answer or ()] + missing

    def install_hint(self) -> str | None:
        """How to install what it requires; None if everything is there."""
        if not missing_requirements(self.info.requires):
            return None
        return install_hint(self.info.requires, self.info.extra, self.row.distribution)


@dataclass(frozen=True)
class _WithLibraries(Environment):
    """A machine on which every library is installed."""

    def has_module(self, name: str) -> bool:  # noqa: ARG002
        return True


def load_row(row: PluginRow, front_door: Any = None, timeout: float | None = None) -> tuple[LoadedPlugin, float]:
    """Import (unless `front_door` is given) and check; the plugin, and the seconds its import took.

    timeout: seconds to wait for the import, None for ever; a module that is still running then is left to its thread.
    Raises LoadFailure.
    """
    start = perf_counter()
    if front_door is None:
        front_door = import_value(row.value) if timeout is None else _import_in_thread(row.value, timeout)
    seconds = perf_counter() - start
    if isinstance(front_door, type):
        front_door = _guarded(front_door, "making an instance of it failed")
    loaded: LoadedPlugin = _guarded(lambda: _checked(row, front_door), "its front door failed when looked at")
    return loaded, seconds


def _checked(row: PluginRow, front_door: Any) -> LoadedPlugin:
    info = _info(front_door)
    return LoadedPlugin(row, info, front_door, _registered(front_door, kind_named(row.kind)))


def import_value(value: str) -> Any:
    """The object that `module` or `module:attribute` names. Raises LoadFailure, whatever the module does: a plugin
    that exits the interpreter is a broken plugin. Only an interrupt from the keyboard is let through."""
    module_name, _, attribute = value.partition("[")[0].strip().partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise LoadFailure(f"{value!r} is not of the form module or module:attribute")
    module = _guarded(lambda: importlib.import_module(module_name), f"importing {module_name} failed")
    if not attribute:
        return module
    try:
        return _guarded(lambda: attrgetter(attribute)(module), f"reading {value} failed")
    except LoadFailure as failure:
        if isinstance(failure.__cause__, AttributeError):
            raise NoFrontDoor(f"the module {module_name} has no attribute {attribute!r}") from None
        raise


def described(error: BaseException) -> str:
    """An exception in one line: its type and message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _guarded(function: Callable[[], Any], what: str) -> Any:
    try:
        return function()
    except (KeyboardInterrupt, LoadFailure):
        raise
    except BaseException as error:
        raise LoadFailure(f"{what}: {described(error)}") from error


def _import_in_thread(value: str, timeout: float) -> Any:
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(import_value(value))
        except LoadFailure as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name=f"import {value}", daemon=True)
    thread.start()
    thread.join(timeout)
    if not outcome:
        raise LoadFailure(f"importing {value} did not finish within {timeout:g} seconds")
    if isinstance(outcome[0], LoadFailure):
        raise outcome[0]
    return outcome[0]


def _info(front_door: Any) -> PluginInfo:
    info = getattr(front_door, "info", None)
    if info is None:
        raise LoadFailure("its front door has no `info` (a PluginInfo)")
    if not isinstance(info, PluginInfo):
        raise LoadFailure(f"its `info` is of type {type(info).__name__}, not PluginInfo")
    if info.options is not None:
        from pydantic import BaseModel

        if not (isinstance(info.options, type) and issubclass(info.options, BaseModel)):
            raise LoadFailure(f"its `info.options` must be a pydantic model, not {info.options!r}")
    return info


def _registered(front_door: Any, kind: PluginKind) -> pluggy.PluginManager:
    """A plugin manager with this front door alone, all its hooks checked against their specifications."""
    manager = pluggy.PluginManager(PROJECT_NAME)
    for module in _specifications():
        manager.add_hookspecs(module)
    try:
        manager.register(front_door, name=f"{kind.name} plugin")
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise LoadFailure(f"its hooks do not fit: {' '.join(str(error).split())}") from error
    names = [hook.__name__ for hook in kind.hooks]
    implemented = {caller.name for caller in manager.get_hookcallers(front_door) or ()}
    if implemented.isdisjoint(names):
        unmarked = [name for name in names if callable(getattr(front_door, name, None))]
        if unmarked:
            raise LoadFailure(f"{unmarked[0]} is not marked with @hookimpl")
        raise LoadFailure(f"its front door implements no {' or '.join(names)}")
    return manager


@cache
def _specifications() -> tuple[ModuleType, ...]:
    """The modules that hold hook specifications: those of the kinds, and the hooks common to all."""
    modules = {hook.__module__ for kind in KINDS for hook in (*kind.hooks, *kind.optional_hooks)} | {
        common_hooks.__name__
    }
    return tuple(importlib.import_module(name) for name in sorted(modules))
