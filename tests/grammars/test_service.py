"""Compiling in another process: whatever a library does there, the engine goes on."""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from llmkit.config.sections import StructuredConfig
from llmkit.grammars import compile_messages
from llmkit.grammars.backends import GrammarBackends
from llmkit.grammars.cache import GrammarFailure, ReadyGrammar
from llmkit.grammars.compile_messages import Hello
from llmkit.grammars.service import GrammarService
from llmkit.hookspecs.plugin import Environment
from llmkit.hookspecs.structured import CompiledGrammar, GrammarRequest
from llmkit.registry import Registry
from llmkit.requests.grammar_task import GrammarTask
from llmkit.testing import hostile_grammars
from llmkit.testing.hostile_grammars import HostileCompiler, Panic

from .conftest import EOS, byte_vocabulary, hostile_service, settled, wait_until


def task(*choices: str) -> GrammarTask:
    return GrammarTask(GrammarRequest("choice", json.dumps(choices)), ("hostile",))


def allowed(row: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_gone(pid: int) -> bool:
    """Whether the process has ended; it may still wait for somebody to take note."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


def test_a_grammar_is_compiled_elsewhere_and_ready_here(service: GrammarService) -> None:
    ticket = service.submit(task("yes", "abc"))
    assert ticket.result is None
    assert settled(service, ticket) == [ticket]
    ready = ticket.result
    assert isinstance(ready, ReadyGrammar)
    assert allowed(ready.row) == {ord("y"), ord("a"), 257}
    assert not ready.accepting
    assert service.process.pid not in (None, os.getpid())


def test_the_compile_process_gives_way_to_the_engine(service: GrammarService) -> None:
    """In a session of its own its niceness said nothing where processors are shared out by session: a step of 3.6 ms
    took 18 while something was compiled."""
    settled(service, service.submit(task("yes")))
    pid = service.process.pid
    assert pid is not None
    assert os.getsid(pid) == os.getsid(0)
    assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpgid(pid) == pid  # what ends it ends its children, and an interrupt of the terminal does not reach it


def test_a_grammar_is_released_in_a_thread_when_nothing_uses_it(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = hostile_service(registry)
    released: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr(
        hostile_grammars.CompiledChoices, "release", lambda _: released.put(threading.current_thread().name)
    )
    ticket = service.submit(task("yes"))
    settled(service, ticket)
    ready = ticket.result
    assert isinstance(ready, ReadyGrammar)
    state = ready.compiled.start()
    service.cache.put(("hostile", GrammarRequest("choice", "another")), GrammarFailure("no"))
    assert released.empty()
    ticket.result = None
    service.cache.put(("hostile", task("yes").request), GrammarFailure("no"))
    assert released.empty()
    del ready, state
    assert released.get(timeout=30) == "llmkit-grammar-disposal"
    service.close()
    assert released.empty()


def test_what_is_preloaded_leaves_nothing_to_be_imported_for_the_first_grammar(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library is imported here, before anybody asks; the compile process starts beside."""
    warmed: list[threading.Thread] = []
    monkeypatch.setattr(HostileCompiler, "warm_up", lambda _: warmed.append(threading.current_thread()))
    monkeypatch.setattr("llmkit.grammars.service.PRELOADED", task("yes").request)
    service = hostile_service(registry)
    try:
        service.preload()
        assert warmed == [threading.current_thread()]
        wait_until(lambda: len(service.cache) == 1, service)
        assert service.process.pid is not None
        assert isinstance(service.submit(task("yes")).result, ReadyGrammar)
    finally:
        service.close()


def test_masks_that_take_too_long_are_found_before_the_step_loop_has_to_wait_for_one(registry: Registry) -> None:
    """Also behind the first token, which is the first one that is slow here."""
    service = hostile_service(registry, mask_timeout_s=0.2)
    try:
        slow, quick = service.submit(task("!busy", "!busier")), service.submit(task("yes"))
        settled(service, slow, quick)
        assert isinstance(slow.result, GrammarFailure)
        assert "takes too long: 0.2 s after 1 tokens" in slow.result.message
        assert slow.result.refused
        assert isinstance(quick.result, ReadyGrammar)
    finally:
        service.close()


def test_what_was_not_judged_at_the_door_is_judged_where_it_is_compiled(service: GrammarService) -> None:
    unknown = service.submit(GrammarTask(GrammarRequest("regex", "a"), ("hostile",), judged=False))
    malformed = service.submit(
        GrammarTask(GrammarRequest("json_schema", '{"type":"strin"}'), ("hostile", "second"), judged=False)
    )
    good = service.submit(GrammarTask(GrammarRequest("choice", '["unjudged"]'), ("hostile",), judged=False))
    settled(service, unknown, malformed, good)
    assert isinstance(unknown.result, GrammarFailure)
    assert "It knows choices only, not regex" in unknown.result.message
    assert unknown.result.refused
    assert isinstance(malformed.result, GrammarFailure)
    assert malformed.result.message.startswith("The JSON schema is malformed: type at #")
    assert list(malformed.tried) == ["hostile"]  # no other engine would find it well-formed
    assert isinstance(good.result, ReadyGrammar)


def test_a_later_engine_is_asked_for_its_problems_where_it_is_compiled(
    crowded: tuple[GrammarService, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the engine's process, where the answer may take seconds of the interpreter."""
    service, _ = crowded

    def problems(*_: object) -> list[str]:
        raise AssertionError("asked beside the steps")

    monkeypatch.setattr(HostileCompiler, "problems", problems)
    ticket = service.submit(GrammarTask(task("!refuse").request, ("hostile", "second")))
    settled(service, ticket)
    assert list(ticket.tried) == ["hostile", "second"]


@pytest.mark.parametrize("error", [RuntimeError("broken"), Panic("index out of bounds")])
def test_what_cannot_be_preloaded_is_only_said(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def warm_up(_: HostileCompiler) -> None:
        raise error

    monkeypatch.setattr(HostileCompiler, "warm_up", warm_up)
    service = hostile_service(registry)
    service.preload()
    assert "hostile could not be preloaded" in caplog.text
    assert service.process.pid is None
    service.close()


def test_nothing_is_preloaded_where_no_engine_is_installed(registry: Registry) -> None:
    class Bare(Environment):
        def has_module(self, name: str) -> bool:  # noqa: ARG002
            return False

    nobody = GrammarBackends("auto", registry, Bare(), byte_vocabulary)
    service = GrammarService(nobody, StructuredConfig())
    service.preload()
    assert service.process.pid is None
    service.close()


def test_equal_grammars_are_compiled_once(service: GrammarService) -> None:
    first, second = service.submit(task("once")), service.submit(task("once"))
    assert set(settled(service, first, second)) == {first, second}
    assert first.result is second.result
    hits = service.cache.num_hits
    third = service.submit(task("once"))
    assert third.result is first.result
    assert service.cache.num_hits == hits + 1
    assert service.finished() == []


@pytest.mark.parametrize(
    ("act", "refused", "message"),
    [
        ("!spin", True, r"took longer than 1 s \(structured.compile_timeout_s\)"),
        ("!memory", True, r"took more than 64 MiB of memory \(structured.compile_memory_mib\)"),
        ("!abort", False, r"The library crashed \(SIGABRT\)"),
        ("!segfault", False, r"The library crashed \(SIGSEGV\)"),
        ("!exit", False, r"The library crashed \(status 3\)"),
        ("!raise", False, "RuntimeError: not compiled today"),
        ("!refuse", True, "hostile refuses it: nobody shall say this"),
        ("!load", False, "RuntimeError: not loaded today"),
        ("!size", False, "ValueError: invalid literal"),
        ("!start", True, ""),
    ],
)
def test_what_goes_wrong_fails_one_grammar(service: GrammarService, act: str, refused: bool, message: str) -> None:
    bad, good = service.submit(task(act)), service.submit(task("good", act[1:]))
    settled(service, bad, good)
    assert isinstance(good.result, ReadyGrammar)
    if act == "!start":  # it shows only later
        assert isinstance(bad.result, ReadyGrammar)
        return
    assert isinstance(bad.result, GrammarFailure)
    assert bad.result.refused is refused
    assert re.search(message, bad.result.message), bad.result.message
    # Asked again soon, it fails at once.
    assert service.submit(task(act)).result == bad.result


def test_faults_of_the_plugin_are_counted_and_refusals_are_not(registry: Registry) -> None:
    service = hostile_service(registry)
    try:
        settled(service, *(service.submit(task(act)) for act in ("!abort", "!raise", "!refuse", "!load")))
        breaker = service.backends.backend("hostile").breaker
        assert breaker.num_faults == 3
    finally:
        service.close()


def test_a_grammar_that_nobody_wants_any_more_is_not_compiled_on(registry: Registry) -> None:
    service = hostile_service(registry, compile_processes=1)
    try:
        settled(service, service.submit(task("up")))
        pid = service.process.pid
        assert pid is not None
        spinning, also = service.submit(task("!spin")), service.submit(task("!spin"))
        behind = service.submit(task("behind"))
        wait_until(lambda: len(children_of(pid)) == 1, service)
        service.cancel(also)
        assert spinning.result is behind.result is None
        service.cancel(spinning)
        settled(service, behind)  # has got the room
        assert isinstance(behind.result, ReadyGrammar)
        wait_until(lambda: not children_of(pid), service)
        assert spinning.result is None
        service.cancel(spinning)  # once more: nothing happens
    finally:
        service.close()


@pytest.fixture
def crowded(registry: Registry) -> Iterator[tuple[GrammarService, list[float]]]:
    """Compiles one grammar at a time, by a clock of the test's; "hostile" and "second" are engines of one kind."""
    registry.register("structured", "second", hostile_grammars)
    now = [0.0]
    service = hostile_service(registry, lambda: now[0], compile_processes=1, compile_timeout_s=2.0, compile_wait_s=5.0)
    yield service, now
    service.close()


def test_a_grammar_waits_for_others_for_some_time_and_no_longer(crowded: tuple[GrammarService, list[float]]) -> None:
    service, now = crowded
    settled(service, service.submit(task("up")))
    spinning = service.submit(task("!spin"))
    wait_until(lambda: service.num_waiting == 0, service)
    early = service.submit(task("behind"))
    now[0] = 4.0
    late = service.submit(task("behind"))
    assert service.finished() == []
    now[0] = 5.0
    assert service.finished() == [early]
    assert isinstance(early.result, GrammarFailure)
    assert (early.result.overloaded, early.result.refused) == (True, False)
    assert "waited longer than 5 s (structured.compile_wait_s)" in early.result.message
    # What is being compiled goes on, and whoever may still wait gets the grammar.
    settled(service, spinning, late)
    assert isinstance(spinning.result, GrammarFailure)
    assert not spinning.result.overloaded
    assert isinstance(late.result, ReadyGrammar)


def test_a_grammar_that_was_late_is_not_remembered_as_bad(crowded: tuple[GrammarService, list[float]]) -> None:
    service, now = crowded
    spinning, late = service.submit(task("!spin")), service.submit(task("late"))
    wait_until(lambda: service.num_waiting == 1, service)
    now[0] = 5.0
    assert service.finished() == [late]
    service.cancel(spinning)
    again = service.submit(task("late"))
    settled(service, again)
    assert isinstance(again.result, ReadyGrammar)


def test_the_next_engine_is_not_tried_when_the_time_is_over(crowded: tuple[GrammarService, list[float]]) -> None:
    service, now = crowded
    ticket = service.submit(GrammarTask(task("!spin").request, ("hostile", "second")))
    wait_until(lambda: service.num_waiting == 0, service)
    now[0] = 5.0
    settled(service, ticket)
    assert isinstance(ticket.result, GrammarFailure)
    assert (ticket.result.overloaded, ticket.result.refused) == (False, True)
    assert "hostile: Compiling the grammar took longer than 2 s" in ticket.result.message
    assert "second: not tried any more after 5 s" in ticket.result.message


def test_first_tries_come_before_second_ones(crowded: tuple[GrammarService, list[float]]) -> None:
    service, _ = crowded
    twice = service.submit(GrammarTask(task("!refuse").request, ("hostile", "second")))
    spinning = service.submit(task("!spin"))
    wait_until(lambda: bool(twice.tried) and service.num_waiting == 1, service)
    once = service.submit(task("!refuse", "once"))
    service.cancel(spinning)
    assert settled(service, twice, once) == [once, twice]


def test_a_dead_compile_process_fails_what_it_was_at_and_is_replaced(registry: Registry) -> None:
    service = hostile_service(registry)
    try:
        settled(service, service.submit(task("up")))
        pid = service.process.pid
        assert pid is not None
        ticket = service.submit(task("!spin"))
        wait_until(lambda: len(children_of(pid)) == 1, service)
        (child,) = children_of(pid)
        os.kill(pid, 9)
        settled(service, ticket)
        assert isinstance(ticket.result, GrammarFailure)
        assert "has died" in ticket.result.message
        assert not ticket.result.refused
        wait_until(lambda: is_gone(child), service)  # nobody is left spinning
        again = service.submit(task("again"))
        settled(service, again)
        assert isinstance(again.result, ReadyGrammar)
        assert service.process.pid != pid
    finally:
        service.close()


def test_what_cannot_be_sent_to_the_compile_process_fails_and_nobody_waits(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = hostile_service(registry)

    def no_hello() -> Hello:
        raise Panic("the vocabulary is broken")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(service.process, "_make_hello", no_hello)
            bad = service.submit(task("bad"))
            settled(service, bad)
        assert isinstance(bad.result, GrammarFailure)
        assert "could not be started: Panic: the vocabulary is broken" in bad.result.message
        good = service.submit(task("good"))
        settled(service, good)
        assert isinstance(good.result, ReadyGrammar)
    finally:
        service.close()


def test_what_nobody_understands_fails_what_was_asked_and_nothing_after_it(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = hostile_service(registry)

    def unreadable(_: object) -> object:
        raise pickle.UnpicklingError("invalid load key")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(compile_messages, "read", unreadable)
            bad = service.submit(task("bad"))
            settled(service, bad)
        assert isinstance(bad.result, GrammarFailure)
        assert "has died" in bad.result.message
        good = service.submit(task("good"))
        settled(service, good)
        assert isinstance(good.result, ReadyGrammar)
    finally:
        service.close()


def test_close_ends_the_process_and_its_children(registry: Registry) -> None:
    service = hostile_service(registry)
    settled(service, service.submit(task("up")))
    pid = service.process.pid
    assert pid is not None
    service.submit(task("!spin"))
    wait_until(lambda: len(children_of(pid)) == 1, service)
    (child,) = children_of(pid)
    service.close()
    service.close()
    assert service.process.pid is None
    wait_until(lambda: is_gone(child), service)


def test_a_front_door_without_a_name_cannot_reach_the_compile_process(registry: Registry) -> None:
    from llmkit.testing import hostile_grammars

    class Local:
        info = hostile_grammars.info
        llmkit_grammar_compiler = staticmethod(hostile_grammars.llmkit_grammar_compiler)

    registry.unregister("structured", "hostile")
    registry.register("structured", "hostile", Local)
    service = hostile_service(registry)
    try:
        ticket = service.submit(task("yes"))
        settled(service, ticket)
        assert isinstance(ticket.result, GrammarFailure)
        assert "register a module or class" in ticket.result.message
    finally:
        service.close()


def test_the_end_token_is_never_text(service: GrammarService) -> None:
    ticket = service.submit(task("", "x"))
    settled(service, ticket)
    assert isinstance(ticket.result, ReadyGrammar)
    assert ticket.result.accepting
    assert EOS not in allowed(ticket.result.row)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own")
def test_the_steps_come_before_what_loads(service: GrammarService, monkeypatch: pytest.MonkeyPatch) -> None:
    """To load may be to compile again, for seconds, while the steps need every processor."""
    found: list[int] = []
    load = HostileCompiler.load

    def noted(compiler: HostileCompiler, request: GrammarRequest, compiled: bytes) -> CompiledGrammar:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return load(compiler, request, compiled)

    monkeypatch.setattr(HostileCompiler, "load", noted)
    ticket = service.submit(task("how nice"))
    settled(service, ticket)
    assert found == [max(os.getpriority(os.PRIO_PROCESS, 0), 10)]
