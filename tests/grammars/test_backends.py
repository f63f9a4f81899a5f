# ruff: noqa: ARG001, ARG002 - fakes of a contract, whose arguments they do not need
"""The choice of the grammar engine for a request."""

from __future__ import annotations

from time import thread_time
from typing import Any

import pytest

from llmkit.errors import InvalidRequestError, PluginError
from llmkit.frontend.token_vocabulary import TokenVocabulary
from llmkit.grammars.backends import GrammarBackends
from llmkit.grammars.cache import FAILURE_S, GrammarCache, GrammarFailure
from llmkit.grammars.constraints import JUDGED_CHARS
from llmkit.grammars.effort import DOOR_S, Effort, TooMuchEffort, spend
from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.hookspecs.plugin import Environment
from llmkit.hookspecs.structured import CompiledGrammar, GrammarCompiler, GrammarRequest
from llmkit.registry import Registry
from llmkit.registry.breakers import Breakers
from llmkit.registry.policy import policy_from
from llmkit.testing.hostile_grammars import Panic

from .conftest import byte_vocabulary

REGEX, CHOICE = GrammarRequest("regex", "a+"), GrammarRequest("choice", '["a"]')


class Engine(GrammarCompiler):
    """Knows some kinds; scores regular expressions."""

    def __init__(self, kinds: tuple[str, ...], score: int, fault: BaseException | None) -> None:
        self._kinds, self._score, self._fault = kinds, score, fault

    def problems(self, request: GrammarRequest) -> list[str]:
        if self._fault is not None:
            raise self._fault
        return [] if request.kind in self._kinds else [f"It knows no {request.kind}."]

    def score(self, request: GrammarRequest) -> int:
        return self._score if request.kind == "regex" else 0

    def compile(self, request: GrammarRequest) -> bytes:
        return b""

    def load(self, request: GrammarRequest, compiled: bytes) -> CompiledGrammar:
        raise NotImplementedError


def front_door(
    rank: int,
    kinds: tuple[str, ...],
    score: int = 0,
    fault: BaseException | None = None,
    built: list[int] | None = None,
    **info: Any,
) -> type:
    class Door:
        llmkit_grammar_compiler: Any

    def build(vocabulary: TokenVocabulary) -> GrammarCompiler:
        if built is not None:
            built.append(rank)
        return Engine(kinds, score, fault)

    build.__name__ = "llmkit_grammar_compiler"
    Door.info = PluginInfo("an engine", rank=rank, **info)  # type: ignore[attr-defined]
    Door.llmkit_grammar_compiler = staticmethod(hookimpl(build))
    return Door


def backends(choice: str = "auto", **doors: type) -> GrammarBackends:
    from llmkit.config.sections import PluginsConfig

    registry = Registry((), policy_from(PluginsConfig(auto="any")))
    for name, door in doors.items():
        registry.register("structured", name, door)
    return GrammarBackends(choice, registry, Environment(), byte_vocabulary, Breakers())


def test_auto_takes_the_highest_rank_that_has_no_problems() -> None:
    found = backends(
        first=front_door(5, ("regex",)), second=front_door(3, ("regex", "choice")), third=front_door(1, ("choice",))
    )
    assert found.choose(REGEX).backends == ("first", "second", "third")
    assert found.choose(CHOICE).backends == ("second", "third")
    chosen = {s.name: s for s in found.registry.selections}
    assert chosen["first"].choice == "auto"
    assert "regex" in chosen["first"].reason
    assert chosen["second"].rejected == {"first": "It knows no choice."}
    found.choose(CHOICE)
    assert len(found.registry.selections) == 2  # each engine is noted once


@pytest.mark.parametrize("choice", ["auto", "second"])
def test_nobody_is_asked_at_the_door_about_what_is_large(choice: str) -> None:
    """Reading a schema of a megabyte took up to minutes there."""
    large = GrammarRequest("regex", "a" * (JUDGED_CHARS + 1))
    fault = AssertionError("asked at the door")
    found = backends(
        choice,
        first=front_door(5, ("regex",), fault=fault),
        second=front_door(3, ("regex",), score=1, fault=fault),
    )
    task = found.choose(large)
    assert task.backends == (("second", "first") if choice == "auto" else ("second",))
    assert not task.judged
    assert found.backend("second").breaker.num_faults == 0
    for _ in range(8):
        found.backend("second").breaker.record("broken")
    if choice == "auto":
        assert found.choose(large).backends == ("first",)
    else:
        with pytest.raises(InvalidRequestError, match="has failed too often"):
            found.choose(large)


class Digger(Engine):
    """Asked whether it can, it has work for ever."""

    def problems(self, request: GrammarRequest) -> list[str]:
        while True:
            spend()


@pytest.mark.parametrize("choice", ["auto", "second"])
def test_what_takes_too_long_at_the_door_is_judged_where_it_is_compiled(choice: str) -> None:
    """A schema of 3600 characters whose alternatives multiply took 0.9 s there, and kept others from their tokens."""
    found = backends(choice, first=front_door(5, ("choice",)), second=front_door(3, ("regex",), score=1))
    found.backend("second").compiler = Digger(("regex",), 1, None)
    start = thread_time()
    task = found.choose(REGEX)
    assert thread_time() - start < 10 * DOOR_S
    assert task.backends == (("second", "first") if choice == "auto" else ("second",))
    assert not task.judged
    assert found.backend("second").breaker.num_faults == 0


def test_effort_is_limited_for_all_uses_together_and_within_them_only() -> None:
    def work(seconds: float) -> None:
        end = thread_time() + seconds
        while thread_time() < end:
            spend()

    effort = Effort(0.01)
    work(0.02)
    with effort.limited():
        work(0.004)
    work(0.02)
    with pytest.raises(TooMuchEffort), effort.limited():
        work(0.008)
    work(0.02)


def test_a_higher_score_for_the_request_comes_before_rank() -> None:
    found = backends(first=front_door(5, ("regex", "choice")), second=front_door(3, ("regex", "choice"), score=1))
    assert found.choose(REGEX).backends[0] == "second"
    assert found.choose(CHOICE).backends[0] == "first"


def test_nobody_can_and_everybody_says_why() -> None:
    found = backends(first=front_door(5, ("regex",)), second=front_door(3, ()))
    with pytest.raises(InvalidRequestError, match="no grammar engine can express this choice constraint") as raised:
        found.choose(CHOICE)
    assert "first: It knows no choice. second: It knows no choice." in str(raised.value)
    assert raised.value.param == "structured_outputs"


def test_a_named_engine_refuses_and_names_one_that_can() -> None:
    found = backends("first", first=front_door(5, ("regex",)), second=front_door(3, ("choice",)))
    assert found.choose(REGEX).backends == ("first",)
    with pytest.raises(
        InvalidRequestError, match=r"first cannot express .*It knows no choice.*second can \(--structured second"
    ):
        found.choose(CHOICE)


def test_without_any_engine_it_says_what_to_install() -> None:
    door = front_door(5, ("regex",), requires=("no-such-library>=3",), extra="xgrammar")
    found = backends(absent=door, hidden=front_door(9, ("regex",), auto=False))
    with pytest.raises(InvalidRequestError, match="needs a grammar engine, and none can be used here") as raised:
        found.choose(REGEX)
    assert "no-such-library" in str(raised.value)
    assert raised.value.hint is not None
    assert "pip install" in raised.value.hint


def test_a_named_engine_that_cannot_work_here_is_an_error_at_start() -> None:
    door = front_door(5, ("regex",), requires=("no-such-library>=3",))
    with pytest.raises(PluginError, match="no-such-library"):
        backends("absent", absent=door).require()
    with pytest.raises(PluginError, match="nowhere"):
        backends("nowhere").require()
    backends("auto", absent=door).require()  # it may never be needed


def test_engines_are_built_when_they_are_needed() -> None:
    built: list[int] = []
    found = backends(first=front_door(5, ("regex",), built=built))
    assert built == []
    found.choose(REGEX)
    found.choose(REGEX)
    assert built == [5]
    assert found.compiler("first") is found.compiler("first")


@pytest.mark.parametrize("fault", [RuntimeError("broken"), Panic("broken"), SystemExit(1)])
def test_one_that_fails_when_asked_is_passed_over_and_left_alone_in_the_end(fault: BaseException) -> None:
    found = backends(bad=front_door(5, ("regex",), fault=fault), good=front_door(3, ("regex",)))
    for _ in range(8):
        assert found.choose(REGEX).backends == ("good",)
    breaker = found.backend("bad").breaker
    assert breaker.open
    assert breaker.num_faults == 5  # then nobody asked any more
    assert "has failed too often" in str(found.why_not(found.backend("bad"), REGEX))


def test_a_malformed_request_is_the_same_for_all() -> None:
    fault = InvalidRequestError("malformed", param="structured_outputs")
    found = backends(first=front_door(5, ("regex",), fault=fault), second=front_door(3, ("regex",)))
    with pytest.raises(InvalidRequestError, match="malformed"):
        found.choose(REGEX)


def test_the_cache_forgets_what_was_used_longest_ago() -> None:
    cache = GrammarCache(3 * 4200)
    keys = [("e", GrammarRequest("regex", f"a{i}")) for i in range(4)]
    for key in keys[:3]:
        cache.put(key, GrammarFailure("no"))
    assert cache.get(keys[0]) is not None
    cache.put(keys[3], GrammarFailure("no"))
    assert [cache.get(key) is not None for key in keys] == [True, False, True, True]
    assert len(cache) == 3
    assert cache.size_bytes <= 3 * 4200


def test_failures_are_forgotten_after_a_while() -> None:
    now = [0.0]
    cache = GrammarCache(1 << 20, clock=lambda: now[0])
    cache.put(("e", REGEX), GrammarFailure("too slow"))
    now[0] = FAILURE_S
    assert cache.get(("e", REGEX)) is not None
    now[0] += 1
    assert cache.get(("e", REGEX)) is None
    assert cache.size_bytes == 0
