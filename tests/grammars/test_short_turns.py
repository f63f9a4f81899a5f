"""The turns that threads take while a library is imported beside the step loop."""

from __future__ import annotations

import sys
import threading

import pytest

from llmkit.grammars.short_turns import SHORT_S, short_turns


def test_turns_are_short_while_anybody_is_inside_and_as_before_afterwards() -> None:
    before = sys.getswitchinterval()
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with short_turns():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with short_turns():
        assert sys.getswitchinterval() == pytest.approx(SHORT_S)
        thread.start()
        entered.wait()
    assert sys.getswitchinterval() == pytest.approx(SHORT_S)
    leave.set()
    thread.join()
    assert sys.getswitchinterval() == before
    with pytest.raises(ValueError, match="within"), short_turns():
        raise ValueError("within")
    assert sys.getswitchinterval() == before
