"""What is refused whichever engine gets it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from llmkit.errors import InvalidRequestError
from llmkit.frontend.token_vocabulary import TokenVocabulary
from llmkit.grammars.constraints import JUDGED_CHARS, check_request, grammar_request
from llmkit.hookspecs.structured import GrammarRequest
from llmkit.requests.structured_outputs import StructuredOutputs

GAPS = frozenset({0x04, 0xF1})
VOCABULARY = TokenVocabulary(tuple(b"" if i in GAPS else bytes([i]) for i in range(256)), frozenset(), frozenset())


def request_of(**constraint: Any) -> GrammarRequest:
    return grammar_request(StructuredOutputs(**constraint), VOCABULARY, 32)


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        ({"json": {"b": 1, "a": "é"}}, GrammarRequest("json_schema", '{"b":1,"a":"é"}')),
        ({"json": ' { "type" : "null" } '}, GrammarRequest("json_schema", '{"type":"null"}')),
        ({"json": True}, GrammarRequest("json_schema", "true")),
        ({"json_object": True}, GrammarRequest("json_object", "")),
        ({"regex": "a+"}, GrammarRequest("regex", "a+")),
        ({"choice": ["é", "b"]}, GrammarRequest("choice", '["é", "b"]')),
        ({"grammar": 'root ::= "a"'}, GrammarRequest("grammar", 'root ::= "a"')),
        ({"structural_tag": '{"format": {}}'}, GrammarRequest("structural_tag", '{"format":{}}')),
        (
            {"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "},
            GrammarRequest("json_object", "", disable_any_whitespace=True, whitespace_pattern=" "),
        ),
    ],
)
def test_requests(constraint: dict[str, Any], expected: GrammarRequest) -> None:
    assert request_of(**constraint) == expected


def test_equal_schemas_are_one_request_and_the_order_of_properties_counts() -> None:
    one, other = {"properties": {"a": {}, "b": {}}}, {"properties": {"b": {}, "a": {}}}
    assert request_of(json=one) == request_of(json=json.dumps(one, indent=4))
    assert request_of(json=one) != request_of(json=other)


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"json": {"type": "strin"}}, "malformed: type at #"),
        ({"json": "{"}, "is not JSON"),
        ({"json": "false"}, "false allows no answer"),
        ({"json": {"const": float("nan")}}, "is no JSON"),
        ({"json": {"const": {1, 2}}}, "is no JSON"),
        ({"json": {"properties": {3: {"type": "strin"}}}}, "malformed: type at #/properties/3"),
        ({"json": {"enum": ["x" * 1_000_001]}}, "at most 1000000 characters"),
        ({"json": {"const": "\ud83d"}}, "no token for"),
        ({"json": {"title": "\ud83d"}}, "half of a surrogate pair"),
        ({"regex": "\ud83d"}, "half of a surrogate pair"),
        ({"structural_tag": "["}, "is no JSON"),
        ({"structural_tag": "[]"}, "must be an object"),
        # The vocabulary has no token for some bytes: such a text could never be written.
        ({"choice": ["fine", "\U00040000"]}, "no token for"),
        ({"choice": ["\x04"]}, "no token for"),
        ({"json": {"properties": {"a": {"enum": ["fine", "\U00040000"]}}}}, "no token for"),
        ({"json": {"type": "object", "required": ["\U00040000"]}}, "no token for"),
    ],
)
def test_what_is_wrong_is_refused(constraint: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        request_of(**constraint)
    assert message in str(raised.value)
    assert raised.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"json": {"type": "strin", "title": "x" * JUDGED_CHARS}}, "malformed: type at #"),
        ({"json": "{" + " " * JUDGED_CHARS}, "is not JSON"),
        ({"json": {"required": ["\U00040000"], "title": "x" * JUDGED_CHARS}}, "no token for"),
        ({"choice": ["\x04", *(f"{i}" * 4000 for i in range(5))]}, "no token for"),
        ({"structural_tag": "[" + " " * JUDGED_CHARS}, "is no JSON"),
        # As at the door, where it is written without escapes first.
        ({"json": json.dumps({"title": "\ud83d" + "x" * JUDGED_CHARS})}, "half of a surrogate pair"),
        ({"structural_tag": json.dumps({"a": "\ud83d" + "x" * JUDGED_CHARS})}, "half of a surrogate pair"),
        ({"json": '{"maximum": 1e999}' + " " * JUDGED_CHARS}, "is no JSON"),
        ({"structural_tag": '{"a": 1e999}' + " " * JUDGED_CHARS}, "is no JSON"),
    ],
)
def test_what_is_large_is_judged_later(constraint: dict[str, Any], message: str) -> None:
    """Not at the door, which shares its interpreter with others."""
    request = request_of(**constraint)
    with pytest.raises(InvalidRequestError, match=re.escape(message)):
        check_request(request, VOCABULARY)


def test_json_escapes_what_the_vocabulary_lacks() -> None:
    assert request_of(json={"const": "\x04"}).kind == "json_schema"  # written as \u0004
