"""Formats whose calls are JSON objects: hermes, llama3-json, mistral."""

from __future__ import annotations

import json

import pytest

from llmkit.testing.answers import TOOLS, ReadAnswer, read_calls, read_with

CALL = '{"name": "noop", "arguments": {"a": 1}}'
READ = (("noop", '{"a": 1}'),)


@pytest.fixture
def hermes(form):
    return lambda text: read_with(form("hermes"), text)


def between(text):
    return f"<tool_call>{text}</tool_call>"


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "noop"}', '{"a": 1}'),
        ('{"name": "noop", "parameters": {"a": 1}}', '{"a": 1}'),
        ('{"id": [1, {"x": "}"}], "type": "function", "name": "noop", "arguments": {"a": 1}, "n": -1.5e3}', '{"a": 1}'),
        ('{"name": "noop"}', "{}"),
        ('{"name": "noop", "arguments": null}', "{}"),
        ('{"name": "noop", "arguments": ""}', "{}"),
        ('{"name": "noop", "arguments": "{\\"a\\": \\"\\\\u00e9\\\\n\\"}"}', '{"a": "\\u00e9\\n"}'),
        ('{"arguments": "{\\"\\ud83d\\ude00\\": \\"\\ud83d\\"}", "name": "noop"}', '{"😀": "\ufffd"}'),
        ('{"name": "noop", "arguments": {"a": 1}', '{"a": 1}'),
        ('{"name": "noop", "arguments": {"a": 1}}}', '{"a": 1}'),
        ('{"name": "noop", "arguments": {"a": 1},}', '{"a": 1}'),
        ('  {\n"name"\t:\r\n"noop" , "arguments" : {"a":\n1}\n}  ', '{"a":\n1}'),
        ('{"name": "noop", "arguments": {"a": "one\ntwo\tthree"}}', '{"a": "one\\ntwo\\tthree"}'),
        ('{"name": "noop", "arguments": {\'a\': wrong, ]}}', "{'a': wrong, ]}"),
        ('{"name": "noop", "arguments": {"a": [1}', '{"a": [1}'),
        ('{"name": "no\\u006fp", "arguments": {}}', "{}"),
        ('{"name": "noop", "name": "other", "arguments": {}, "arguments": {"b": 2}}', "{}"),
    ],
)
def test_ways_to_write_a_call(hermes, inside, arguments):
    assert hermes(between(inside)) == ReadAnswer("", (("noop", arguments),))


@pytest.mark.parametrize(
    "inside",
    [
        "",
        "noop",
        "[]",
        "{}",
        '{"arguments": {}}',
        '{"name": 1, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "\\ud83d", "arguments": {}}',
        '{"name": "noop", "arguments": 5}',
        '{"name": "noop", "arguments": [1]}',
        '{"name": "noop" "arguments": {}}',
        '{"name": "' + "x" * 2000 + '", "arguments": {}}',
        "{'name': 'noop', 'arguments': {}}",
    ],
)
def test_what_is_no_call_is_content(hermes, inside):
    assert hermes(between(inside)) == ReadAnswer(between(inside), ())
    assert hermes(between(inside) + between(CALL)) == ReadAnswer(between(inside), READ)


def test_an_unknown_name_is_a_call_where_marks_leave_no_doubt(form):
    call = '{"name": "other", "arguments": {}}'
    assert read_with(form("hermes"), between(call)).calls == (("other", "{}"),)
    assert read_with(form("mistral"), f"[TOOL_CALLS][{call}]").calls == (("other", "{}"),)
    assert read_with(form("llama3-json"), f"<|python_tag|>{call}").calls == (("other", "{}"),)
    assert read_with(form("llama3-json"), call) == ReadAnswer(call, ())
    assert read_with(form("mistral"), f"[{call}]") == ReadAnswer(f"[{call}]", ())


def test_a_missing_end_mark_ends_nothing_else(hermes):
    assert hermes(f"<tool_call>{CALL}\n{between(CALL)} Done.") == ReadAnswer("Done.", READ * 2)
    assert hermes(f"<tool_call>{CALL} and more</tool_call> and on") == ReadAnswer("and more and on", READ)
    unclosed = '<tool_call>{"name": "noop", "arguments": {"a": 1</tool_call>'
    assert hermes(unclosed + between(CALL)) == ReadAnswer("", (("noop", '{"a": 1'), *READ))


def test_end_marks_without_a_beginning_are_content(hermes):
    assert hermes("a</tool_call>b") == ReadAnswer("a</tool_call>b", ())
    assert hermes(between(CALL) + "x</tool_call>") == ReadAnswer("x</tool_call>", READ)


def test_blanks_between_texts_are_kept(hermes):
    text = f" \n Hello.\n\n{between(CALL)}\n\nBye.\n"
    assert hermes(text) == ReadAnswer(" \n Hello.\n\n\n\nBye.", READ)
    assert hermes(f"\n\n{between(CALL)}\nBye.") == ReadAnswer("Bye.", READ)


def test_arguments_are_told_as_they_arrive(form):
    parser = form("hermes").parser(TOOLS)
    pieces = ('<tool_call>{"name": "sea', 'rch", "argu', 'ments": {"query": "lo', "ng te", 'xt"}', "}</tool_call>")
    told = [[(call.index, call.name, call.arguments) for call in parser.feed(piece).tool_calls] for piece in pieces]
    assert told == [
        [],
        [],
        [(0, "search", '{"query": "lo')],
        [(0, None, "ng te")],
        [(0, None, 'xt"}')],
        [],
    ]
    assert parser.finish().tool_calls == ()


def test_an_escape_that_is_cut_off_is_not_told(form):
    """Of arguments in a string: what has been told is the beginning of what would have come."""
    whole = '{"name": "noop", "arguments": "\\ud83d\\ude00\\n\\u00e9"}'
    for end in range(whole.index('"\\ud'), len(whole)):
        found = read_with(form("hermes"), "<tool_call>" + whole[:end])
        assert all("😀\né".startswith(arguments) for _, arguments in found.calls)


def test_llama_separators(form):
    read = lambda text: read_with(form("llama3-json"), text)  # noqa: E731
    call = '{"name": "noop", "parameters": {"a": 1}}'
    for separator in ("; ", ";", "\n", ", ", " ", "\n\n;\n"):
        assert read(separator.join([call] * 3)) == ReadAnswer("", READ * 3)
    assert read(f"{call};") == ReadAnswer("", READ)
    assert read(f"<|python_tag|>{call}; {call}") == ReadAnswer("", READ * 2)
    assert read("<|python_tag|>print(1)") == ReadAnswer("<|python_tag|>print(1)", ())
    assert read(f"For example {call}") == ReadAnswer(f"For example {call}", ())
    assert read(f"I call it:\n  {call}") == ReadAnswer("I call it:", READ)
    assert read(f'{call}; {{"b": 1}}') == ReadAnswer('; {"b": 1}', READ)


def test_mistral_layouts(form):
    read = lambda text: read_with(form("mistral"), text)  # noqa: E731
    for text in (
        f"[TOOL_CALLS] [{CALL}]",
        f"[TOOL_CALLS]{CALL}",
        f"[{CALL}]",
        '[TOOL_CALLS]noop{"a": 1}',
        '[TOOL_CALLS]noop[ARGS]{"a": 1}',
        '[TOOL_CALLS]noop[CALL_ID]Ab3[ARGS] {"a": 1}',
        'noop[ARGS]{"a": 1}',
        f"[TOOL_CALLS][{CALL}",
    ):
        assert read(text) == ReadAnswer("", READ), text
    assert read(f"[TOOL_CALLS] [{CALL},\n{CALL}] text") == ReadAnswer("text", READ * 2)
    assert read('Hi [TOOL_CALLS]noop{"a": 1}[TOOL_CALLS]noop{"a": 1}') == ReadAnswer("Hi", READ * 2)
    assert read('[TOOL_CALLS]noop{"a": 1[TOOL_CALLS]noop{"a": 1}').calls == (("noop", '{"a": 1'), *READ)
    for text in ('noop{"a": 1}', "[TOOL_CALLS]noop", "[TOOL_CALLS]", "[TOOL_CALLS][1]", "[[1]]", "[TOOL_CALLS]a b{}"):
        assert read(text) == ReadAnswer(text, ()), text


def test_mistral_can_be_made_to_write_either_layout(form):
    calls = [("noop", "{}"), ("noop", "{}")]
    assert form("mistral", layout="named").written(calls) == "[TOOL_CALLS]noop[ARGS]{}[TOOL_CALLS]noop[ARGS]{}"
    tag = form("mistral", layout="named").constraint(TOOLS, "noop", False).structural_tag
    assert "noop[ARGS]" in json.dumps(tag)
    assert form("mistral").needs_special_tokens


def test_deltas_of_a_long_answer_hold_no_more_than_they_must(form):
    """Text before a call is told at once, up to what may be a mark."""
    parser = form("hermes").parser(TOOLS)
    assert parser.feed("Hello <").content == "Hello"
    assert parser.feed("b> there").content == " <b> there"
    assert read_calls(parser, []).content == ""
