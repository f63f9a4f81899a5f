"""Stop strings over token borders."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from llmkit.frontend.stop_strings import StopMatch, StopStringMatcher


def run(pieces, stops, **kwargs):
    """(shown text, stop string or None) after feeding `pieces`, one token each."""
    matcher = StopStringMatcher(stops, **kwargs)
    shown = []
    for number, piece in enumerate(pieces, 1):
        result = matcher.feed(piece, number)
        if isinstance(result, StopMatch):
            return "".join([*shown, result.text]), result.stop
        shown.append(result)
    return "".join([*shown, matcher.flush()]), None


def test_almost_a_stop_appears_once():
    """B06."""
    pieces = [" H", " I", " K", " L", " P", " Q", " R"]
    assert run(pieces, ["L P X", "Z9"]) == (" H I K L P Q R", None)


def test_text_is_held_back_only_while_it_may_become_a_stop():
    matcher = StopStringMatcher(["abc"])
    assert [matcher.feed(c, i) for i, c in enumerate("xabxab", 1)] == ["x", "", "", "abx", "", ""]
    assert matcher.flush() == "ab"


def test_a_stop_over_several_tokens():
    assert run(["say ST", "O", "P now"], ["STOP"]) == ("say ", "STOP")
    assert run(["say ST", "O", "P now"], ["STOP"], include_in_output=True) == ("say STOP", "STOP")


def test_the_first_to_be_complete_wins_then_the_longest():
    assert run(["abcd"], ["abcd", "bc"]) == ("a", "bc")
    assert run(["abc"], ["bc", "abc"]) == ("", "abc")


def test_overlapping_beginnings():
    assert run("aaab", ["aab"]) == ("a", "aab")


def test_min_tokens_counts_the_token_that_completes_the_stop():
    """B08 a."""
    pieces = [" six", ",", " seven", ",", " eight", ",", " nine", ","]
    assert run(pieces, [","], min_tokens=6) == (" six, seven, eight", ",")
    assert run(pieces, [","]) == (" six", ",")
    assert run(pieces, [","], min_tokens=7) == (" six, seven, eight, nine", ",")


TEXT = st.text("ab", max_size=20)


@given(text=TEXT, stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), cuts=st.lists(st.integers(1, 4)))
def test_the_result_does_not_depend_on_the_cuts(text, stops, cuts):
    pieces, rest = [], text
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    expected = next(
        ((text[:end], end) for end in range(1, len(text) + 1) if any(text[:end].endswith(s) for s in stops)), None
    )
    shown, stop = run([*pieces, rest], stops)
    if expected is None:
        assert (shown, stop) == (text, None)
    else:
        longest = max((s for s in stops if expected[0].endswith(s)), key=len)
        assert (shown, stop) == (expected[0].removesuffix(longest), longest)


def test_long_stop_strings_cost_no_more_than_short_ones():
    """The most that a request may hold, all of it almost there with every token."""
    matcher = StopStringMatcher(["a" * (4095 - i) + "b" for i in range(4)])
    began = time.monotonic()
    shown = "".join(matcher.feed("a", i) for i in range(50_000)) + matcher.flush()
    assert shown == "a" * 50_000
    assert time.monotonic() - began < 10  # minutes, if every stop string is looked at for every token


def test_a_stop_that_came_too_early_may_begin_the_next_one():
    assert run(["ab", "c"], ["ab", "abc"], min_tokens=2) == ("", "abc")
    assert run(["ab", "ab"], ["ab"], min_tokens=2) == ("ab", "ab")
    assert run(["aa", "a"], ["aa"], min_tokens=2) == ("a", "aa")


@given(
    pieces=st.lists(st.text("ab", min_size=1, max_size=3), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 6),
)
def test_what_is_held_back_is_as_short_as_can_be(pieces, stops, min_tokens):
    matcher = StopStringMatcher(stops, min_tokens=min_tokens)
    text = shown = ""
    for number, piece in enumerate(pieces, 1):
        text += piece
        result = matcher.feed(piece, number)
        if isinstance(result, StopMatch):
            assert number >= min_tokens
            return
        shown += result
        held = [
            end for end in range(1, len(text) + 1) if any(s != text[-end:] and s.startswith(text[-end:]) for s in stops)
        ]
        assert shown == text[: len(text) - max(held, default=0)]
