"""A check that does not end."""

from __future__ import annotations

import signal
import threading

import pytest

from llmkit.testing.conformance import patience
from llmkit.testing.conformance.patience import RanOutOfTime, at_most


def test_waiting_is_ended_and_the_place_is_named():
    with pytest.raises(RanOutOfTime, match=r"not ended after 0\.05 seconds .*It was in .*wait"), at_most(0.05):
        threading.Event().wait()


def test_who_catches_it_and_goes_on_meets_it_again(monkeypatch):
    monkeypatch.setattr(patience, "AGAIN_S", 0.05)
    caught = []

    def stubborn():
        while len(caught) < 3:
            try:
                threading.Event().wait()
            except BaseException as error:
                caught.append(error)
        threading.Event().wait()

    with pytest.raises(RanOutOfTime), at_most(0.05):
        stubborn()
    assert len(caught) == 3


def test_what_ends_is_left_alone():
    before = signal.getsignal(signal.SIGALRM)
    with at_most(1000):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert signal.getsignal(signal.SIGALRM) is before


def test_there_is_no_limit_of_zero_and_none_beside_the_main_thread():
    def work():
        with at_most(1):
            timers.append(signal.getitimer(signal.ITIMER_REAL)[0])

    timers = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    with at_most(0):
        timers.append(signal.getitimer(signal.ITIMER_REAL)[0])
    assert timers == [0, 0]
