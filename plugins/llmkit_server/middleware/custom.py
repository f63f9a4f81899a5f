"""Middleware of the operator's own, by name."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp

from llmkit.errors import ConfigError, described


def load_middleware(name: str) -> Any:
    """The class or function called `module:attribute` (or `module.attribute`). Modules in the working folder are found.

    Raises ConfigError."""
    module_name, separator, attribute = name.partition(":")
    if not separator:
        module_name, _, attribute = name.rpartition(".")
    if not module_name or not attribute:
        raise ConfigError(f"server.middleware {name!r} is not of the form module:attribute.")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        found = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ConfigError(f"server.middleware {name!r} cannot be loaded: {described(error)}.") from error
    finally:
        sys.path.remove(here)
    if not callable(found):
        raise ConfigError(f"server.middleware {name!r} is {type(found).__name__}, not a class or function.")
    return found


def wrap(app: ASGIApp, middleware: Any) -> ASGIApp:
    """`app` in `middleware`: a class or factory that takes the app, or a coroutine function (request, call_next)."""
    if inspect.iscoroutinefunction(middleware):
        return BaseHTTPMiddleware(app, dispatch=middleware)
    wrapped: ASGIApp = middleware(app)
    return wrapped
