"""The tools of a request: what is one and what is not."""

from __future__ import annotations

import pytest

from llmkit.answers.tools import function_tools, parameters_of, tool_names
from llmkit.errors import InvalidRequestError

GOOD = {"type": "function", "function": {"name": "f"}}


def named(name):
    return {"function": {"name": name}}


def test_checked_tools_are_what_was_given():
    tools = function_tools([GOOD, named("g.h-i_1")])
    assert tools == [GOOD, named("g.h-i_1")]
    assert tool_names(tools) == {"f", "g.h-i_1"}
    assert function_tools(()) == []


def test_a_tool_without_parameters_takes_none():
    for parameters in ({}, {"parameters": None}, {"parameters": {}}):
        schema = parameters_of({"function": {"name": "f", **parameters}})
        assert schema == {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (3, "must be a list"),
        ("f", "must be a list"),
        ({"function": {}}, "must be a list"),
        ([3], r"tools\[0\] must be an object"),
        ([GOOD, {"type": "retrieval"}], r"tools\[1\] must be an object of type"),
        ([{"type": "function"}], "function must be an object with a name"),
        ([named(None)], "name must have"),
        ([named("")], "name must have"),
        ([named("a b")], "name must have"),
        ([named('a"b')], "name must have"),
        ([named("x" * 129)], "name must have"),
        ([named("auto")], "be none of auto"),
        ([GOOD, GOOD], "as that of another tool"),
        ([{"function": {"name": "f", "parameters": [1]}}], "parameters must be a JSON schema"),
        ([{"function": {"name": "f", "strict": 1}}], "strict must be"),
        ([named(f"f{i}") for i in range(1025)], "at most 1024"),
    ],
)
def test_what_is_no_tool_is_refused(tools, message):
    with pytest.raises(InvalidRequestError, match=message) as refusal:
        function_tools(tools)
    assert refusal.value.param == "tools"
