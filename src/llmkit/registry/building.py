"""Call the hook that builds a plugin's object, and check what comes back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from llmkit.errors import LlmkitError
from llmkit.registry.loading import LoadedPlugin, described

if TYPE_CHECKING:
    from pydantic import BaseModel


def call_hook(plugin: LoadedPlugin, options: BaseModel | None, arguments: Mapping[str, Any]) -> Any:
    """The object that the plugin's hook returns for `arguments`, with `options` added where the hook takes them.

    Raises TypeError if `arguments` are not the hook's (a mistake of the caller), PluginError if the hook fails or
    returns something else than its contract says. Errors that llmkit raises on purpose, such as ModelError, pass.
    """
    if len(plugin.kind.hooks) != 1:
        raise TypeError(f"plugins of kind {plugin.row.kind} build nothing; use Registry.observers")
    (hook,) = plugin.kind.hooks
    wanted = set(inspect.signature(hook).parameters)
    passed = {**arguments, "options": options} if "options" in wanted else dict(arguments)
    if set(passed) != wanted:
        raise TypeError(f"{hook.__name__} takes {sorted(wanted)}, not {sorted(passed)}")
    try:
        built = getattr(plugin.manager.hook, hook.__name__)(**passed)
    except (LlmkitError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise plugin.row.error(f"its {hook.__name__} failed: {described(error)}") from error
    expected = _returned_class(hook)
    if built is None or (expected is not None and not isinstance(built, expected)):
        name = expected.__name__ if expected else hook.__annotations__.get("return", "an object")
        raise plugin.row.error(f"its {hook.__name__} returned a {type(built).__name__} where a {name} is expected")
    return built


def _returned_class(hook: Callable[..., Any]) -> type | None:
    """The class that the specification promises, if its module defines it; others are not imported to check."""
    found = vars(inspect.getmodule(hook)).get(str(hook.__annotations__.get("return")))
    return found if isinstance(found, type) else None
