"""A reader sees the text as if it were there as a whole, and keeps no more of it than it must."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmkit.answers.arriving_text import BLANKS, ArrivingText, Markers

MARKS = Markers("<a>", "</a>", "[x]")


def read(pieces):
    """(what was written before each mark, mark) of all, by a reader."""
    text, found = ArrivingText(), []

    def reader():
        while True:
            written = []
            marker = yield from text.until(MARKS, written.append)
            found.append(("".join(written), marker))
            if marker is None:
                return

    running = reader()
    for piece in pieces:
        text.run(running, piece)
    text.run(running, None)
    return found


@given(st.lists(st.text("<>/a[x] ", max_size=4), max_size=12))
def test_marks_are_found_wherever_the_text_is_cut(pieces):
    parts = re.split(r"(<a>|</a>|\[x\])", "".join(pieces))
    assert read(pieces) == list(zip(parts[::2], [*parts[1::2], None], strict=True))


@given(st.text("ab \n", max_size=30), st.integers(1, 5))
def test_reading_ahead_does_not_depend_on_the_pieces(text, size):
    def read_all(pieces):
        arriving, found = ArrivingText(), []

        def reader():
            while (yield from arriving.peek()):
                arriving.record("^")
                found.append((yield from arriving.is_next("ab")))
                found.append((yield from arriving.ahead(3)))
                found.append((yield from arriving.take("b")))
                found.append((yield from arriving.take_all(BLANKS, most=2)))
                arriving.advance(len((yield from arriving.peek())))
                found.append(arriving.recorded())

        running = reader()
        for piece in pieces:
            arriving.run(running, piece)
        arriving.run(running, None)
        return found

    cut = [text[i : i + size] for i in range(0, len(text), size)]
    assert read_all(cut) == read_all([text])
    assert "".join(part[1:] for part in read_all(cut) if isinstance(part, str) and part[:1] == "^") == text


@pytest.mark.parametrize(("drop", "expected"), [(True, "x"), (False, "x<")])
def test_a_mark_that_is_cut_off_may_be_dropped(drop, expected):
    text, written = ArrivingText(), []

    def reader():
        yield from text.until(MARKS, written.append, drop_cut=drop)

    running = reader()
    text.run(running, "x<")
    assert written == ["x"]
    text.run(running, None)
    assert "".join(written) == expected
