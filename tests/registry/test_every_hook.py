# ruff: noqa: ARG002 - implementations of contracts, whose arguments they do not need
"""Every hook of every kind has a test; here those whose objects the engine core does not use yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmkit.errors import PluginError
from llmkit.hookspecs import Environment, PluginInfo, hookimpl
from llmkit.hookspecs.connector import (
    Connector,
    ConnectorBuilder,
    LoadOffer,
    Retention,
    SchedulerConnector,
    SchedulerContext,
    TransferReport,
    WorkerConnector,
    WorkerContext,
)
from llmkit.hookspecs.kinds import KINDS
from llmkit.hookspecs.structured import CompiledGrammar, Grammar, GrammarCompiler, GrammarRequest
from llmkit.kv_cache.layout import KVCacheLayout
from llmkit.registry import Registry

TESTS = Path(__file__).parents[1]
TINY = KVCacheLayout((), 2, 4, 4)


@pytest.mark.parametrize("hook", [hook.__name__ for kind in KINDS for hook in (*kind.hooks, *kind.optional_hooks)])
def test_every_hook_is_implemented_in_a_test(hook: str) -> None:
    implementation = f"def {hook}("
    called = f".{hook}("
    texts = (path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py"))
    assert any(implementation in text or called in text or f'"{hook}"' in text for text in texts)


class Nowhere(SchedulerConnector, WorkerConnector):
    """Both halves of a connector that has nothing and keeps nothing; only what the contract demands."""

    def offer(self, request: Any, num_computed_tokens: int) -> LoadOffer:
        return LoadOffer(0)

    def plan_transfers(self, plan: Any) -> None:
        return

    def register(self, layout: Any, kv_caches: Any) -> None:
        return

    def start_load(self, payload: Any) -> None:
        return

    def report(self) -> TransferReport:
        return TransferReport()


class NowhereConnector(Connector):
    info = PluginInfo("to nowhere")

    def scheduler_half(self, context: SchedulerContext) -> SchedulerConnector:
        return Nowhere()

    def worker_half(self, context: WorkerContext) -> WorkerConnector:
        return Nowhere()

    @staticmethod
    @hookimpl
    def llmkit_connector(build: ConnectorBuilder) -> Connector:
        assert callable(build)
        return NowhereConnector()


class OnlyToken(Grammar):
    """Token 33, and then the end."""

    def __init__(self) -> None:
        self.accepted = 0

    def fill_bitmask(self, row: Any) -> None:
        row[:] = 0
        row[33 // 32] |= 1 << (33 % 32)

    def accept(self, token_id: int) -> bool:
        self.accepted += token_id == 33
        return token_id == 33

    def validate(self, token_ids: Any) -> int:
        return 1 if list(token_ids)[:1] == [33] else 0

    def rollback(self, num_tokens: int) -> None:
        self.accepted -= num_tokens

    def is_accepting(self) -> bool:
        return self.accepted > 0


class CompiledOnlyToken(CompiledGrammar):
    def start(self) -> Grammar:
        return OnlyToken()


class OnlyTokenCompiler(GrammarCompiler):
    info = PluginInfo("one token")

    def __init__(self, vocabulary: Any = None) -> None:
        self.vocabulary = vocabulary

    def problems(self, request: GrammarRequest) -> list[str]:
        return [] if request.kind == "choice" else [f"{request.kind} cannot be expressed"]

    def compile(self, request: GrammarRequest) -> bytes:
        return request.source.encode()

    def load(self, request: GrammarRequest, compiled: bytes) -> CompiledGrammar:
        return CompiledOnlyToken()

    @staticmethod
    @hookimpl
    def llmkit_grammar_compiler(vocabulary: Any) -> GrammarCompiler:
        return OnlyTokenCompiler(vocabulary)


def test_a_connector_builds_its_halves(cpu: Environment) -> None:
    registry = Registry.discover()
    registry.register("connector", "nowhere", NowhereConnector)
    connector = registry.create("connector", "nowhere", cpu, build=lambda *_: NowhereConnector())
    worker = connector.worker_half(WorkerContext(0, 1, "", "both"))
    scheduler = connector.scheduler_half(SchedulerContext(TINY, "", 1, 8, "both", iter(range(9)).__next__))
    # What the contract has defaults for does nothing.
    for call in (worker.wait_for_save, worker.close, scheduler.close, scheduler.reset):
        assert call() is None
    assert worker.wait_for_layer(0) is worker.save_layer(0) is scheduler.update(worker.report()) is None
    assert scheduler.preempted(None) is worker.cancel([1]) is worker.wait(0.0) is None
    assert scheduler.offer(None, 0).num_tokens == 0
    assert scheduler.problems({}) == []
    assert scheduler.request_finished(None, ()) == Retention()
    assert not worker.report()


def test_a_grammar_compiler_gets_the_vocabulary(cpu: Environment) -> None:
    registry = Registry.discover()
    registry.register("structured", "one", OnlyTokenCompiler)
    vocabulary = object()
    compiler = registry.create("structured", "one", cpu, vocabulary=vocabulary)
    assert compiler.vocabulary is vocabulary
    assert compiler.problems(GrammarRequest("regex", "a+")) == ["regex cannot be expressed"]
    # What the contract has defaults for: nothing to warm up, and no preference.
    request = GrammarRequest("choice", '["!"]')
    assert compiler.warm_up() is None
    assert compiler.score(request) == 0
    grammar = compiler.load(request, compiler.compile(request)).start()
    row = np.full(2, -1, dtype=np.int32)
    grammar.fill_bitmask(row)
    assert row.tolist() == [0, 2]
    assert grammar.accept(33)
    assert grammar.is_accepting()


def test_a_weights_format_gets_the_seed(cpu: Environment) -> None:
    from llmkit_weights.dummy import DummyFormat

    seeds: list[int] = []

    class Recording:
        info = PluginInfo("notes the seed")

        @staticmethod
        @hookimpl
        def llmkit_weights(seed: int) -> Any:
            seeds.append(seed)
            return DummyFormat(seed)

    registry = Registry.discover()
    registry.register("weights", "recording", Recording)
    registry.create("weights", "recording", cpu, seed=7)
    assert seeds == [7]


@pytest.mark.parametrize("kind", ["connector", "structured"])
def test_an_object_that_breaks_the_contract_is_refused(cpu: Environment, kind: str) -> None:
    class Wrong:
        info = PluginInfo("returns something else")
        llmkit_connector = staticmethod(hookimpl(lambda: 5)) if kind == "connector" else None
        llmkit_grammar_compiler = staticmethod(hookimpl(lambda: 5)) if kind == "structured" else None

    registry = Registry.discover()
    registry.register(kind, "wrong", Wrong)
    arguments = {"vocabulary": None} if kind == "structured" else {"build": None}
    with pytest.raises(PluginError, match="returned a int"):
        registry.create(kind, "wrong", cpu, **arguments)
