"""Property: what is read does not depend on where the text was cut, whatever the text."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmkit.testing.answers import TOOLS, read_calls, read_with

FORMATS = ("hermes", "llama3-json", "mistral", "pythonic", "qwen")

WORDS = (
    *("<tool_call>", "</tool_call>", "<function=search>", "</function>", "<parameter=query>", "</parameter>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "search", "noop", "get_weather", "noop()", "search("),
    *('{"name": "noop"', '"arguments": ', '"parameters": {', "query=", '"query": "', "'", '"', "'''", "\\", "\\u00e9"),
    *(
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        ",",
        ":",
        ";",
        " ",
        "\n",
        "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
    ),
    *("1.50", "true", "None", "null", "é", "<", "</", "text", "\x01"),
)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
arguments = st.fixed_dictionaries(
    {}, optional={"query": st.text(max_size=20), "filter": st.dictionaries(st.text(max_size=4), values, max_size=3)}
)
calls = st.lists(st.tuples(st.just("search"), arguments), min_size=1, max_size=3)
relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)


def cut(text, places):
    ends = sorted({min(place, len(text)) for place in places} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("name", FORMATS)
@relaxed
@given(words=st.lists(st.sampled_from(WORDS), max_size=25), places=st.lists(st.integers(0, 150)))
def test_of_any_text(form, name, words, places):
    text = "".join(words)
    whole = read_with(form(name), text)
    assert read_calls(form(name).parser(TOOLS), cut(text, places)) == whole
    assert read_calls(form(name).parser(TOOLS), list(text)) == whole
    if not whole.calls:
        assert whole.content == text


@pytest.mark.parametrize("name", FORMATS)
@relaxed
@given(wanted=calls, ascii_only=st.booleans(), places=st.lists(st.integers(0, 300)))
def test_of_calls_that_are_read_back(form, name, wanted, ascii_only, places):
    written = [(called, json.dumps(value, ensure_ascii=ascii_only)) for called, value in wanted]
    text = form(name).written(written)
    found = read_calls(form(name).parser(TOOLS), cut(text, places))
    assert [(called, json.loads(value)) for called, value in found.calls] == wanted
    assert found.content == ""
