"""The extension API is complete: every kind of the design, every hook documented."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from llmkit import hookspecs
from llmkit.hookspecs.kinds import KINDS, kind_named
from llmkit.hookspecs.markers import PROJECT_NAME


def all_hooks() -> Iterator[Callable[..., Any]]:
    for module in pkgutil.iter_modules(hookspecs.__path__, "llmkit.hookspecs."):
        loaded = __import__(module.name, fromlist=["x"])
        yield from (
            function
            for function in vars(loaded).values()
            if inspect.isfunction(function) and hasattr(function, f"{PROJECT_NAME}_spec")
        )


HOOKS = {hook.__name__: hook for hook in all_hooks()}


def test_every_kind_of_the_design_exists() -> None:
    groups = {kind.name: (kind.group, kind.config_key, kind.flag) for kind in KINDS}
    assert groups == {
        "scheduler": ("llmkit.schedulers", "scheduler.policy", "--scheduler"),
        "attention": ("llmkit.attention_backends", "attention.backend", "--attention"),
        "connector": ("llmkit.connectors", "connector.name", "--connector"),
        "structured": ("llmkit.structured", "structured.backend", "--structured"),
        "model": ("llmkit.models", "model.implementation", "--model-impl"),
        "executor": ("llmkit.executors", "execution.executor", "--executor"),
        "kernels": ("llmkit.kernels", "execution.kernels", "--kernels"),
        "weights": ("llmkit.weights", "model.load_format", "--load-format"),
        "quantization": ("llmkit.quantization", "model.quantization", "--quantization"),
        "tool_parser": ("llmkit.tool_parsers", "server.tool_parser", "--tool-call-parser"),
        "reasoning_parser": ("llmkit.reasoning_parsers", "server.reasoning_parser", "--reasoning-parser"),
        "command": ("llmkit.commands", None, None),
        "extension": ("llmkit.extensions", "extensions", None),
    }


def test_every_hook_belongs_to_a_kind_or_to_all() -> None:
    of_kinds = {hook.__name__ for kind in KINDS for hook in (*kind.hooks, *kind.optional_hooks)}
    assert set(HOOKS) == of_kinds | {"llmkit_problems"}


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_hook_says_what_it_does_and_since_when(name: str) -> None:
    text = inspect.getdoc(HOOKS[name]) or ""
    assert name.startswith("llmkit_")
    assert len(text.splitlines()[0]) > 20
    assert re.search(r"^\.\. versionadded:: \d+\.\d+$", text, re.MULTILINE)


def test_hooks_that_build_return_the_first_result() -> None:
    """An observer's hook is called for all; a hook that builds an object is asked of one plugin."""
    for kind in KINDS:
        for hook in kind.hooks:
            options: dict[str, Any] = getattr(hook, f"{PROJECT_NAME}_spec")
            assert options["firstresult"] is (kind.name != "extension")


def test_unknown_kind_lists_the_kinds() -> None:
    with pytest.raises(KeyError, match="scheduler, attention"):
        kind_named("policy")
