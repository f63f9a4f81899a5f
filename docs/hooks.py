"""MkDocs hook: fills in what is generated from the code, so that the documentation cannot drift from it.

`{{ hooks: KIND }}` becomes the hook specifications of a plugin kind with exact signatures and docstrings,
`{{ contract: module.Class }}` a class with its fields and methods, `{{ function: module.name }}` a function,
`{{ configuration }}` the configuration reference, `{{ kinds }}` the table of plugin kinds.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

from llmkit.config.reference import render_reference
from llmkit.hookspecs.kinds import KINDS, kind_named

MARKER = re.compile(r"^\{\{ *(hooks|contract|function|configuration|kinds)(?:: *([\w.]+))? *\}\}$", re.MULTILINE)


def source_without_decorator(function: Any) -> str:
    """The signature as it stands in the code, up to and including the colon."""
    lines = inspect.getsource(function).splitlines()
    start = next(i for i, line in enumerate(lines) if line.lstrip().startswith("def "))
    signature: list[str] = []
    for line in lines[start:]:
        signature.append(re.sub(r"\s*# type: ignore.*$", "", line))
        if signature[-1].rstrip().endswith(":"):
            break
    return inspect.cleandoc("\n".join(signature))


def render_function(function: Any, level: int) -> str:
    doc = inspect.cleandoc(function.__doc__ or "")
    doc = re.sub(r"\.\. versionadded:: (\S+)", r"*Since version \1.*", doc)
    return f"{'#' * level} `{function.__name__}`\n\n```python\n{source_without_decorator(function)}\n```\n\n{doc}\n"


def render_hooks(kind_name: str) -> str:
    kind = kind_named(kind_name)
    return "\n".join(render_function(hook, 3) for hook in (*kind.hooks, *kind.optional_hooks))


def resolve(path: str) -> Any:
    module_name, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module_name), name)


def render_contract(path: str) -> str:
    cls = resolve(path)
    parts = [f"### `{cls.__name__}`\n\n{inspect.cleandoc(cls.__doc__ or '')}\n"]
    fields = [f"{name}: {kind}" for name, kind in vars(cls).get("__annotations__", {}).items() if name[0] != "_"]
    if fields:
        parts.append("```python\n" + "\n".join(fields) + "\n```\n")
    for name, member in vars(cls).items():
        function = member.fget if isinstance(member, property) else member
        if inspect.isfunction(function) and not name.startswith("_"):
            parts.append(render_function(function, 4))
    return "\n".join(parts)


def render_kinds() -> str:
    rows = ["| kind | entry-point group | configuration key | flag | what it is |", "|---|---|---|---|---|"]
    for kind in KINDS:
        key = f"`{kind.config_key}`" if kind.config_key else "–"
        flag = f"`{kind.flag}`" if kind.flag else "–"
        rows.append(f"| `{kind.name}` | `{kind.group}` | {key} | {flag} | {kind.summary} |")
    return "\n".join(rows)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs for every page."""

    def fill(match: re.Match[str]) -> str:
        what, argument = match.groups()
        if what == "hooks":
            return render_hooks(argument)
        if what == "contract":
            return render_contract(argument)
        if what == "function":
            return render_function(resolve(argument), 3)
        return render_kinds() if what == "kinds" else render_reference()

    return MARKER.sub(fill, markdown)
