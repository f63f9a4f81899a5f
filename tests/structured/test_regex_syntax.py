"""Regular expressions are read as ECMA-262 and Python agree on, or refused."""

from __future__ import annotations

import random
import re
import time

import pytest

from llmkit_structured.regex_match import matches
from llmkit_structured.regex_syntax import UnsupportedRegex, found_in, whole
from llmkit_structured.regex_tree import length_bounds, size


@pytest.mark.parametrize(
    ("source", "whole_texts", "other_texts"),
    [
        ("a|ab", ["a", "ab"], ["", "b", "aba"]),
        ("^ab?c$", ["ac", "abc"], ["abcc", "ac\n"]),
        ("(^a|b)c$", ["ac", "bc"], ["c"]),
        ("[^a-c]{2}", ["xx", "\n\n"], ["ax", "x"]),
        (r"\d{3}-\w", ["123-x", "123-_"], ["١٢٣-x", "12-x", "123-é"]),
        (r"\s\S", [" x", "\ufeffx", "\u00a0é"], ["xx", "  "]),
        (".", ["a", "\U0001f600", "\x00"], ["\n", "\u2028", "ab"]),
        ("(?P<year>a)(?<day>b)(?:c)", ["abc"], ["ab"]),
        ("a+?b*?c??", ["a", "aabbc"], ["", "acc"]),
        (r"A\x42\u{1f600}\ud83d\ude00", ["AB\U0001f600\U0001f600"], ["AB"]),
        (r"\p{Lu}\P{L}", ["A1", "Ä!"], ["a1", "AB"]),
        ("x{2}y{1,}z{,}", None, None),
        (r"[\]\-\\^a]", ["]", "-", "\\", "^", "a"], ["b"]),
        ("a{b}", ["a{b}"], ["ab"]),
        ("", [""], ["a"]),
    ],
)
def test_whole_texts(source: str, whole_texts: list[str] | None, other_texts: list[str] | None) -> None:
    if whole_texts is None or other_texts is None:
        with pytest.raises(UnsupportedRegex):
            whole(source)
        return
    tree = whole(source)
    assert all(matches(tree, text) for text in whole_texts)
    assert not any(matches(tree, text) for text in other_texts)


@pytest.mark.parametrize(
    ("source", "inside", "outside"),
    [
        ("b", ["b", "abc", "\nb\n"], ["", "a"]),
        ("^b", ["b", "bc"], ["ab"]),
        ("b$", ["b", "ab"], ["b\n"]),
        ("^a|b$", ["ax", "xb"], ["xa", "bx"]),
        ("(^|x)a($|y)", ["a", "zxa", "ayz"], ["za", "az"]),
        ("", ["", "anything"], []),
    ],
)
def test_a_pattern_matches_anywhere(source: str, inside: list[str], outside: list[str]) -> None:
    tree = found_in(source)
    assert all(matches(tree, text) for text in inside)
    assert not any(matches(tree, text) for text in outside)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("a^b", "anchor in the middle"),
        (r"\bfoo", "word boundary"),
        ("(?=x)", "look-ahead"),
        ("(?<!x)a", "look-behind"),
        (r"(a)\1", "back-reference"),
        (r"(?P<a>x)(?P=a)", "group '(?P'"),
        ("(?i)a", "flags"),
        ("[[:alpha:]]", "'[:' in a class"),
        ("[]a]", "class without characters"),
        ("a**", "repetition of a repetition"),
        ("a++", "possessive"),
        ("*a", "repetition of nothing"),
        ("a{3,1}", "maximum is below"),
        ("a{10000001}", "more than"),
        ("(", "without a closing one"),
        ("a)", "without an opening one"),
        ("[a", "closing bracket"),
        ("[z-a]", "out of order"),
        (r"[\d-x]", "between classes"),
        ("\\", "backslash at the end"),
        (r"\q", "escape"),
        (r"\ud800", "no character"),
        ("\ud800", "surrogate"),
        (r"\p{Greek}", "general category"),
        ("(" * 200 + ")" * 200, "groups in one another"),
    ],
)
def test_what_cannot_be_read_the_same_everywhere_is_refused(source: str, reason: str) -> None:
    with pytest.raises(UnsupportedRegex, match=re.escape(reason)):
        whole(source)


def _random_source(random_: random.Random, depth: int = 0) -> str:
    kind = random_.randrange(8 if depth < 3 else 3)
    if kind < 3:
        return random_.choice(["a", "b", "[ab]", "[^a]", "c", r"\d", ".", r"\w"])
    if kind < 5:
        return "".join(_random_source(random_, depth + 1) for _ in range(random_.randrange(1, 4)))
    if kind < 6:
        return "(" + "|".join(_random_source(random_, depth + 1) for _ in range(2)) + ")"
    return f"(?:{_random_source(random_, depth + 1)})" + random_.choice(["*", "+", "?", "{2}", "{1,2}", "*?", "{0,}"])


def test_trees_mean_what_python_means() -> None:
    random_ = random.Random(7)
    for _ in range(150):
        source = _random_source(random_)
        tree, original = whole(source), re.compile(source, re.ASCII)
        somewhere = found_in(source)
        shortest, longest = length_bounds(tree)
        for _ in range(40):
            text = "".join(random_.choice("abc1") for _ in range(random_.randrange(6)))
            matched = matches(tree, text)
            assert matched == (original.fullmatch(text) is not None), (source, text)
            assert matches(somewhere, text) == (original.search(text) is not None), (source, text)
            if matched:
                assert shortest <= len(text) <= (longest if longest is not None else len(text)), source


def test_size_counts_repetitions_written_out() -> None:
    assert size(whole("(a{1,500}){1,500}")) == 250_000
    assert size(whole("ab|c*")) == 3


def test_a_long_expression_is_read_in_time_in_proportion_to_its_length() -> None:
    """A million characters are accepted at the door. This took 12 s when every part copied all before it, now 1 s."""
    start = time.process_time()
    tree = whole("a" * 100_000)
    assert time.process_time() - start < 6
    assert size(tree) == size(whole("a")) * 100_000


@pytest.mark.parametrize("source", ["(a|aa)+", "(a*)*", "((a?){1,500}){1,500}", "(.*)*(.*)*", "(((a*)*)*)*"])
@pytest.mark.parametrize("end", ["", "!"])
def test_no_expression_takes_long_to_follow(source: str, end: str) -> None:
    """By backtracking, (a|aa)+ takes 1.6 times as long with every letter, in the process of a server's event loop."""
    start = time.thread_time()
    assert matches(whole(f"^{source}$"), "a" * 2000 + end) == (end == "" or "." in source)
    assert time.thread_time() - start < 1
