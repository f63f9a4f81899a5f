"""Constraints as clients send them."""

from __future__ import annotations

from typing import Any

import pytest

from llmkit.errors import InvalidRequestError
from llmkit.requests.response_format import constraint_of, response_format
from llmkit.requests.structured_outputs import StructuredOutputs

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
NAMED = {"name": "n", "schema": SCHEMA}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"prompt": "x", "temperature": 3, "response_format": None, "guided_json": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "strict": True}}},
            StructuredOutputs(json=SCHEMA),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "strict": None}}},
            StructuredOutputs(json=SCHEMA),
        ),
        (
            {"response_format": {"type": "structural_tag", **TAG}},
            StructuredOutputs(structural_tag={"type": "structural_tag", **TAG}),
        ),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutputs(regex="a+")),
        (
            {"structured_outputs": {"choice": ["a", "b"]}, "response_format": {"type": "text"}},
            StructuredOutputs(choice=("a", "b")),
        ),
        ({"guided_json": SCHEMA}, StructuredOutputs(json=SCHEMA)),
        (
            {"guided_json": "true", "guided_whitespace_pattern": "[ ]?"},
            StructuredOutputs(json="true", whitespace_pattern="[ ]?"),
        ),
        ({"guided_json_object": True}, StructuredOutputs(json_object=True)),
        ({"guided_json_object": False}, None),
        ({"guided_regex": "a+"}, StructuredOutputs(regex="a+")),
        ({"guided_choice": ["a"]}, StructuredOutputs(choice=("a",))),
        ({"guided_grammar": 'root ::= "a"'}, StructuredOutputs(grammar='root ::= "a"')),
    ],
)  # fmt: skip
def test_what_clients_send(body: dict[str, Any], expected: StructuredOutputs | None) -> None:
    assert constraint_of(body) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"type": "json_schema", "schema": SCHEMA}, "name and schema. The schema stands one level too high"),
        ({"type": "json_schema"}, "needs json_schema"),
        ({"type": "json_schema", "json_schema": None}, "has json_schema None"),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, "has json_schema.schema None"),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": "{}"}}, "has json_schema.schema '{}'"),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": False}}, "has json_schema.schema False"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}, "has json_schema.strict 'yes'"),
        ({"type": "xml"}, "has the type 'xml'; it must be one of text, json_object, json_schema, structural_tag"),
        ({"type": ["text"]}, "has the type"),
        ({}, "has the type None"),
        ("json", "must be an object with a type, got 'json'"),
        (["text"], "must be an object"),
        (5, "must be an object"),
    ],
)  # fmt: skip
def test_a_malformed_response_format_is_named(value: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        constraint_of({"response_format": value})
    assert raised.value.param == "response_format"
    assert raised.value.message.startswith("response_format ")
    assert message in raised.value.message


def test_a_schema_of_true_is_any_json() -> None:
    assert response_format({"type": "json_schema", "json_schema": {"schema": True}}) == StructuredOutputs(json=True)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "guided_json"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
        ({"structured_outputs": 1}, "structured_outputs"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_whitespace_pattern": " ", "guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
    ],
)
def test_what_is_wrong_is_told_with_the_clients_own_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        constraint_of(body)
    assert raised.value.param == param
    assert param in raised.value.message
