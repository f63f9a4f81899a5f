"""Fixtures for packages that test an llmkit plugin; pytest finds them once llmkit is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from llmkit.registry import Registry


@pytest.fixture
def llmkit_registry() -> Registry:
    """A fresh registry of everything installed; `register` adds a plugin under test without an entry point."""
    from llmkit.registry import Registry

    return Registry.discover()
