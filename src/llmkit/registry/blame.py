"""Whose fault an exception is that nobody raised on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType

from llmkit.errors import LlmkitError
from llmkit.registry.loading import LoadedPlugin, described


@contextmanager
def blaming(loaded: Callable[[], Iterable[LoadedPlugin]]) -> Iterator[None]:
    """Turn what a plugin raises by mistake into a PluginError that names it; other exceptions pass. `loaded`: asked
    then for the plugins that may be to blame."""
    try:
        yield
    except (LlmkitError, KeyboardInterrupt):
        raise
    except BaseException as error:
        plugin = to_blame(error, loaded())
        if plugin is None:
            raise
        raise plugin.row.error(f"it failed while the engine started: {described(error)}") from error


def to_blame(error: BaseException, loaded: Iterable[LoadedPlugin]) -> LoadedPlugin | None:
    """The plugin in whose code `error` arose: the last one whose module, or else package, was entered, unless llmkit
    itself was entered after it. None if there is none, or if it could be one of several."""
    plugins = [plugin for plugin in loaded if not plugin.row.builtin]
    for module in reversed(list(_modules(error.__traceback__))):
        here = [plugin for plugin in plugins if _module(plugin) == module]
        near = here or [plugin for plugin in plugins if _package(_module(plugin)) == _package(module)]
        if near or _package(module) == "llmkit":
            return near[0] if len(near) == 1 else None
    return None


def _module(plugin: LoadedPlugin) -> str:
    return plugin.row.value.partition(":")[0]


def _package(module: str) -> str:
    return module.partition(".")[0]


def _modules(traceback: TracebackType | None) -> Iterator[str]:
    """The modules that an exception has passed, the outermost first."""
    while traceback is not None:
        yield str(traceback.tb_frame.f_globals.get("__name__", ""))
        traceback = traceback.tb_next
