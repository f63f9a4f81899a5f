"""Faults are counted; after too many the plugin is left alone, and comes back."""

from __future__ import annotations

import logging
import threading

import pytest

from llmkit.registry.breaker import MAX_PAUSE_S, Breaker, FaultCount


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def make(clock, **more):
    return Breaker("scheduler", "mine", limit=3, window_s=60, pause_s=30, clock=clock, **more)


def fail(breaker, times):
    for number in range(times):
        breaker.record(f"fault {number}")


def test_it_is_closed_until_the_limit(clock):
    breaker = make(clock)
    assert not breaker.open
    assert breaker.count() == FaultCount(0, "closed", None)
    fail(breaker, 2)
    assert not breaker.open
    assert (breaker.num_faults, breaker.last_fault) == (2, "fault 1")
    breaker.record(ValueError("no"))
    assert breaker.open
    assert breaker.count() == FaultCount(3, "open", "ValueError: no")


def test_old_faults_do_not_count(clock):
    breaker = make(clock)
    for _ in range(20):
        breaker.record("now and then")
        clock.now += 31
    assert not breaker.open
    assert breaker.num_faults == 20


def test_after_a_pause_it_is_asked_again_and_a_good_plugin_stays(clock):
    breaker = make(clock)
    fail(breaker, 3)
    clock.now += 29.9
    assert breaker.open
    clock.now += 0.1
    assert not breaker.open
    assert breaker.state == "half-open"
    clock.now += 60
    assert breaker.state == "closed"
    fail(breaker, 2)
    assert not breaker.open, "faults from before the pause are forgotten"


def test_a_fault_while_half_open_opens_at_once_and_for_longer(clock):
    breaker = make(clock)
    fail(breaker, 3)
    pause = 30
    for _ in range(8):
        clock.now += pause
        assert not breaker.open
        breaker.record("still broken")
        assert breaker.open
        pause = min(2 * pause, MAX_PAUSE_S)
        clock.now += pause - 0.1
        assert breaker.open
        clock.now += 0.1 - pause
    clock.now += MAX_PAUSE_S + 60
    assert breaker.state == "closed"
    fail(breaker, 3)
    clock.now += 30
    assert not breaker.open, "once it has been good, the pause is the first one again"


def test_faults_that_arrive_while_it_is_open_prolong_nothing(clock):
    breaker = make(clock)
    fail(breaker, 3)
    clock.now += 29
    fail(breaker, 10)
    assert breaker.num_faults == 13
    clock.now += 1
    assert not breaker.open


def test_opening_is_told_and_logged_once(clock, caplog):
    told = []
    breaker = make(clock, on_open=told.append)
    with caplog.at_level(logging.WARNING):
        fail(breaker, 9)
    assert told == [FaultCount(3, "open", "fault 2")]
    assert len(caplog.records) == 1
    assert (
        "The scheduler plugin 'mine' is not asked any more for 30 s, after 3 faults; the last: fault 2" in caplog.text
    )


def test_an_exception_that_cannot_be_put_into_words(clock):
    class Unspeakable(Exception):
        def __str__(self):
            raise RuntimeError

    breaker = make(clock)
    breaker.record(Unspeakable())
    assert breaker.last_fault == "Unspeakable"


def test_no_fault_is_lost_between_threads(clock):
    told = []
    breaker = make(clock, on_open=told.append)
    start = threading.Barrier(4)

    def work():
        start.wait()
        for _ in range(500):
            breaker.record("x")
            assert breaker.open in (True, False)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert breaker.num_faults == 2000
    assert len(told) == 1
