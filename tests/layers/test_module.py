"""Module: direct calls, children as plain attributes, consistent when they are replaced."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from llmkit.layers.module import Module


class Doubling(Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Pair(Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Doubling()
        self.second: Doubling | None = Doubling()


def test_a_call_is_forward_alone() -> None:
    module = Doubling()
    module.register_forward_hook(lambda *_: pytest.fail("hooks are not run"))
    assert module(torch.ones(1)).item() == 2


def test_children_are_found_without_getattr(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    monkeypatch.setattr(nn.Module, "__getattr__", lambda _, name: pytest.fail(f"slow look-up of {name}"))
    assert isinstance(pair.first, Doubling)


def test_replacing_and_removing_children() -> None:
    pair = Pair()
    other = Doubling()
    pair.first = other
    pair.second = None
    assert pair.first is other
    assert pair.second is None
    assert dict(pair.named_children()) == {"first": other}
    del pair.first
    assert not hasattr(pair, "first")
    assert dict(pair.named_children()) == {}
