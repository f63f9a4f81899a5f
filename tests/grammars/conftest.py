"""A grammar engine that misbehaves on demand, and a vocabulary of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic

import pytest

from llmkit.config.sections import StructuredConfig
from llmkit.frontend.token_vocabulary import TokenVocabulary
from llmkit.grammars.backends import GrammarBackends
from llmkit.grammars.service import GrammarService, Ticket
from llmkit.hookspecs.plugin import Environment
from llmkit.registry import Registry
from llmkit.registry.breakers import Breakers
from llmkit.testing import hostile_grammars

EOS = 256


def byte_vocabulary() -> TokenVocabulary:
    return TokenVocabulary((*(bytes([i]) for i in range(256)), b"", b"ab"), frozenset({EOS}), frozenset({EOS}))


@pytest.fixture(scope="session")
def vocabulary() -> TokenVocabulary:
    return byte_vocabulary()


@pytest.fixture
def registry() -> Registry:
    registry = Registry.discover()
    registry.register("structured", "hostile", hostile_grammars)
    return registry


def hostile_service(registry: Registry, clock: Callable[[], float] = monotonic, **settings: float) -> GrammarService:
    backends = GrammarBackends("hostile", registry, Environment(), byte_vocabulary, Breakers())
    return GrammarService(backends, StructuredConfig(**settings), clock)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def service() -> Iterator[GrammarService]:
    """One compile process for all tests of a module: they leave it as they found it."""
    registry = Registry.discover()
    registry.register("structured", "hostile", hostile_grammars)
    service = hostile_service(registry, compile_timeout_s=1.0, compile_memory_mib=64)
    yield service
    service.close()


def settled(service: GrammarService, *tickets: Ticket, seconds: float = 30.0) -> list[Ticket]:
    """Wait for the results of `tickets`; those that `finished` has returned meanwhile, in that order."""
    returned: list[Ticket] = []
    wait_until(lambda: bool(returned.extend(service.finished()) or all(t.result for t in tickets)), service, seconds)
    return returned + service.finished()


def wait_until(condition: Callable[[], bool], service: GrammarService, seconds: float = 30.0) -> None:
    deadline = monotonic() + seconds
    while not condition():
        assert monotonic() < deadline, "nothing comes of it"
        service.wait(0.05)
