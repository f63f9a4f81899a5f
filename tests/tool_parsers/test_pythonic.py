"""Calls in Python's notation, read without running any of it."""

from __future__ import annotations

import json
import warnings

import pytest

from llmkit.errors import InvalidRequestError
from llmkit.testing.answers import TOOLS, ReadAnswer, read_with
from llmkit_tool_parsers.python_literals import json_of_literal


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("1", "1"),
        ("-1.50", "-1.50"),
        ("+2", "2"),
        ("1e5", "1e5"),
        ("1e999", "1e999"),
        ("0x10", "16"),
        ("1_000", "1000"),
        (".5", "0.5"),
        ("1.", "1.0"),
        ("123456789012345678901234567890", "123456789012345678901234567890"),
        ("'it\\'s'", '"it\'s"'),
        ('"a\\/b"', '"a/b"'),
        ("'a\\/b'", '"a\\\\/b"'),
        ('"\\ud83d\\ude00"', '"😀"'),
        ("'\\ud83d\\ude00'", '"😀"'),
        ("'\\ud83d'", '"\ufffd"'),
        ("'''a\nb'''", '"a\\nb"'),
        ("'''a\r\nb'''", '"a\\nb"'),
        ("'a' 'b'", '"ab"'),
        ("r'\\d'", '"\\\\d"'),
        ("'\\d'", '"\\\\d"'),
        ("True", "true"),
        ("false", "false"),
        ("None", "null"),
        ("null", "null"),
        ("[1, 'a', (2,), {'b': []}]", '[1, "a", [2], {"b": []}]'),
        ("{}", "{}"),
        (" [\n1,\n] ", "[1]"),
    ],
)
def test_literals(source, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert json_of_literal(source) == expected
    json.loads(expected)


@pytest.mark.parametrize(
    "source",
    [
        *(
            "",
            " ",
            "x",
            "f()",
            "1 + 1",
            "__import__('os')",
            "lambda: 1",
            "[x for x in y]",
            "f'{a}'",
            "b'a'",
            "1j",
            "...",
        ),
        *(
            "{1: 2}",
            "{**a}",
            "{1, 2}",
            "*a",
            "a.b",
            "a[0]",
            "-'a'",
            "--1",
            "-True",
            "'open",
            "1 if 2 else 3",
            "1)(",
            "#",
        ),
        *(
            "9" * 5000,
            "[" * 40 + "]" * 40,
            "[" * 5000,
            "-" * 5000 + "1",
            "(" * 500 + ")" * 500,
            "\x00",
            "'\x00'",
        ),
        "'" + "a" * 1_000_000 + "'",
    ],
    ids=lambda source: repr(source[:20]),
)
def test_what_is_no_literal(source):
    assert json_of_literal(source) is None


@pytest.fixture
def read(form):
    return lambda text: read_with(form("pythonic"), text)


def test_lists_of_calls(read):
    one = ("search", '{"query": "a, b) ]", "limit": 1}')
    for text in (
        "[search(query='a, b) ]', limit=1)]",
        ' [ search( query = "a, b) ]" ,limit=1, ) , ]',
        "\n[search(\n    query='''a, b) ]''',\n    limit=1,\n)]\n",
    ):
        assert read(text) == ReadAnswer("", (one,)), text
    assert read("[noop(), noop()]\n[noop()]") == ReadAnswer("", (("noop", "{}"),) * 3)
    assert read("Calls:\n[noop()]\nDone.") == ReadAnswer("Calls:\n\nDone.", (("noop", "{}"),))


@pytest.mark.parametrize(
    "text",
    [
        *("[]", "[noop]", "[other()]", "[noop(1)]", "[noop(a)]", "[noop(a=)]", "[noop(a=b)]", "[noop(a=1, a=2)]"),
        *(
            "[noop(a==1)]",
            "[noop(**{})]",
            "[noop(a=[1)]",
            "[noop(a=f())]",
            "See [noop()]",
            "noop()",
            "[noop (",
            "[noop(",
        ),
        *("[noop(a='x\ny')]", "[noop(a=\\)]", "[noop(a=" + "[" * 65 + ")]"),
    ],
    ids=lambda text: repr(text[:25]),
)
def test_what_is_no_call_is_content(read, text):
    assert read(text) == ReadAnswer(text, ())


def test_a_call_that_fails_does_not_take_others_with_it(read):
    assert read("[noop(), other()]") == ReadAnswer(", other()]", (("noop", "{}"),))


def test_what_is_complete_is_told_where_the_text_breaks_off(read):
    whole = "[search(limit=1.50, query='abc'), noop()]"
    calls = [read(whole[:end]).calls for end in range(len(whole) + 1)]
    assert calls[whole.index(", query")] == ()
    assert calls[whole.index("query")] == (("search", '{"limit": 1.50'),)
    assert calls[whole.index("), noop")] == (("search", '{"limit": 1.50'),)
    assert calls[whole.index(", noop")] == (("search", '{"limit": 1.50, "query": "abc"}'),)


def test_a_parameter_that_python_cannot_write_is_refused(form):
    tools = [{"function": {"name": "f", "parameters": {"type": "object", "properties": {"a-b": {}}}}}]
    with pytest.raises(InvalidRequestError, match="'a-b' of the tool 'f'") as refusal:
        form("pythonic").constraint(tools, "required", True)
    assert refusal.value.param == "tools"
    assert form("pythonic").constraint(TOOLS, "auto", False) is None
