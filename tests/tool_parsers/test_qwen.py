"""Functions and parameters as tags, whose values are typed by the schema."""

from __future__ import annotations

import json

import pytest

from llmkit.testing.answers import TOOLS, ReadAnswer, read_with


def tool(**properties):
    return {"function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}


def call(**values):
    return "<tool_call>\n<function=f>\n" + "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items()
    ) + "</function>\n</tool_call>"  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"type": "string"}, "12", '"12"'),
        ({"type": "string"}, "true", '"true"'),
        ({"type": "string"}, '"quoted" \\ é', '"\\"quoted\\" \\\\ é"'),
        ({"type": "string"}, "", '""'),
        ({"type": "string"}, "\n\na\n", '"\\n\\na\\n"'),
        ({"type": "string"}, "<b></b></parameter> x", '"<b></b></parameter> x"'),
        ({"type": "integer"}, "12", "12"),
        ({"type": "integer"}, "12.0", "12"),
        ({"type": "integer"}, "twelve", '"twelve"'),
        ({"type": "number"}, "1.50", "1.50"),
        ({"type": "number"}, "12345678901234567890.10", "12345678901234567890.10"),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "boolean"}, " false ", "false"),
        ({"type": "array"}, '[1, {"a": "b"}]', '[1, {"a": "b"}]'),
        ({"type": "object"}, '{"a": 1.0}', '{"a": 1.0}'),
        ({"type": "object"}, '{"a": ', '"{\\"a\\": "'),
        ({"type": ["string", "null"]}, "None", "null"),
        ({"type": ["string", "null"]}, "12", '"12"'),
        ({"type": ["string", "integer"]}, "12", "12"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", "null"),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"enum": [1, 2]}, "1", "1"),
        ({"const": "1"}, "1", '"1"'),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}, "1", "1"),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}, "1", "1"),
        ({}, "1", "1"),
        ({}, "one", '"one"'),
        (True, "[1]", "[1]"),
        ({"type": "array"}, "[" * 100_000, json.dumps("[" * 100_000)),
    ],
)
def test_values_by_type(form, schema, value, expected):
    found = read_with(form("qwen"), call(x=value), [tool(x=schema)])
    assert found == ReadAnswer("", (("f", f'{{"x": {expected}}}'),))


def test_a_parameter_that_the_schema_does_not_name_is_a_text(form):
    assert read_with(form("qwen"), call(y="12"), [tool()]).calls == (("f", '{"y": "12"}'),)
    assert read_with(form("qwen"), call(y="12"), TOOLS).calls == (("f", '{"y": "12"}'),)


@pytest.mark.parametrize(
    "text",
    [
        "<function=f>\n<parameter=x>\na\n</parameter>\n</function>",
        "<tool_call><function=f><parameter=x>a</parameter></function></tool_call>",
        "<tool_call>\n<function=f>\n<parameter=x>\na\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=x>\na\n</parameter>\n</function>",
        "\n\n<tool_call>\n\n<function=f>\n\n<parameter=x>\na\n</parameter>\n\n\n</function>\n\n</tool_call>\n",
    ],
)
def test_marks_may_be_missing(form, text):
    expected = (("f", '{"x": "a"}'),)
    assert read_with(form("qwen"), text, [tool(x={"type": "string"})]) == ReadAnswer("", expected)
    assert read_with(form("qwen"), f"{text}\n{text}", [tool(x={"type": "string"})]) == ReadAnswer("", expected * 2)


@pytest.mark.parametrize("text", ["<function=", "<function=>", "<function=a b>", "<tool_call>\nf", "<tool_call>"])
def test_what_is_no_call_is_content(form, text):
    assert read_with(form("qwen"), text) == ReadAnswer(text, ())


def test_text_in_the_place_of_a_parameter_ends_the_call(form):
    found = read_with(form("qwen"), "<tool_call><function=noop>oh no</function></tool_call>")
    assert found.calls == (("noop", "{}"),)
    assert "oh no" in found.content


def test_texts_are_told_while_they_arrive(form):
    parser = form("qwen").parser([tool(x={"type": "string"})])
    told = [
        "".join(one.arguments for one in parser.feed(piece).tool_calls)
        for piece in ("<function=f>\n<parameter=x>\n", "one\n", "two\n", "</parameter>", "\n</function>")
    ]
    assert told == ['{"x": "', "one", "\\ntwo", "", '"}']


def test_a_schema_of_a_root_with_definitions(form):
    given = {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
    tools = [{"function": {"name": "f", "parameters": given}}]
    assert read_with(form("qwen"), call(x="7"), tools).calls == (("f", '{"x": 7}'),)
    assert "$defs" in json.dumps(form("qwen").constraint(tools, "required", True).structural_tag)
