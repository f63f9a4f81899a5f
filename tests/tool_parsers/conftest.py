"""Formats by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llmkit.hookspecs.tool_parser import ToolFormat
from llmkit.registry import Registry, detect_environment


@pytest.fixture(scope="session")
def form() -> Callable[..., ToolFormat]:
    """The format called `name`, built with these options."""
    registry = Registry.discover()
    environment = detect_environment("cpu")

    def make(name: str, **options: Any) -> ToolFormat:
        plugin = registry.load("tool_parser", name)
        assert not plugin.problems(environment)
        built: ToolFormat = registry.build(plugin, {}, options)
        return built

    return make
