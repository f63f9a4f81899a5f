"""A pytest plugin for processes in which Triton interprets its kernels.

At every call of a function of a kernel the interpreter goes through all members of Triton's language to find the few
hundred that it puts something else in the place of, in a third of the time of our tests. They are the same each time.
"""

from __future__ import annotations

import inspect
from functools import cache
from types import SimpleNamespace
from typing import Any


def pytest_configure() -> None:
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @cache
    def names(owner: Any) -> tuple[str, ...]:
        return tuple(name for name, member in inspect.getmembers(owner) if is_builtin(member))

    def getmembers(owner: Any) -> list[tuple[str, Any]]:
        return [(name, getattr(owner, name)) for name in names(owner)]

    interpreter.inspect = SimpleNamespace(**vars(inspect) | {"getmembers": getmembers})
