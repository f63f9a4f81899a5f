from __future__ import annotations

import json
from typing import Any

import pytest

from llmkit.errors import InvalidRequestError
from llmkit.grammars.json_schema import EnforcedKeywords, check_schema, schema_problems
from llmkit.grammars.schema_document import MAX_DEPTH, SchemaDocument

PLAIN = EnforcedKeywords(
    keywords=frozenset({"type", "properties", "required", "items", "$ref", "anyOf", "minimum", "additionalProperties"}),
    conditions={
        "pattern": lambda node: "is not enforced beside maxLength" if "maxLength" in node.schema else None,  # type: ignore[operator]
    },
    formats=frozenset({"date"}),
)


def problems(schema: Any, enforced: EnforcedKeywords = PLAIN) -> list[str]:
    return schema_problems(json.dumps(schema), enforced)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a"]},
        {"title": "t", "description": "d", "default": {"not": 1}, "examples": [{"enum": 3}], "$comment": "c", "foo": 7},
        {"type": "integer", "minLength": 3, "uniqueItems": True, "pattern": "a"},  # say nothing about integers
        {"minLength": 0, "uniqueItems": False, "then": {"not": {}}, "propertyNames": True, "minContains": 2},
        {"$defs": {"unused": {"not": {}}}, "type": "string"},
        {"type": "string", "pattern": "a"},
        {"type": "string", "format": "date"},
        {"type": "string", "format": "password"},
        {"$defs": {"tree": {"items": {"$ref": "#/$defs/tree"}}}, "$ref": "#/$defs/tree"},
    ],
)
def test_schemas_without_problems(schema: Any) -> None:
    assert problems(schema) == []


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems at # is not enforced."),
        ({"properties": {"a/b": {"not": {"type": "null"}}}}, "not at #/properties/a~1b is not enforced."),
        ({"type": ["string", "null"], "minLength": 1}, "minLength at # is not enforced."),
        ({"type": "integer", "multipleOf": 7}, "multipleOf at # is not enforced."),
        ({"pattern": "a", "maxLength": 3}, "pattern at # is not enforced beside maxLength."),
        ({"format": "uri"}, "format at # is 'uri', which is not enforced; enforced are date."),
        ({"$defs": {"a b": {"const": 1}}, "$ref": "#/$defs/a%20b"}, "const at #/$defs/a b is not enforced."),
        ({"$defs": {"x": {"$anchor": "here", "const": 1}}, "$ref": "#here"}, "const at #/$defs/x is not enforced."),
        ({"$id": "u:s", "$defs": {"x": {"const": 1}}, "$ref": "u:s#/$defs/x"}, "const at #/$defs/x is not enforced."),
        ({"anyOf": [True, {"oneOf": [False]}]}, "oneOf at #/anyOf/1 is not enforced."),
        ({"$dynamicRef": "#x"}, "$dynamicRef at # is not enforced."),
    ],
)  # fmt: skip
def test_whatever_the_table_does_not_hold_is_named_with_its_place(schema: Any, sentence: str) -> None:
    assert sentence in problems(schema)


def test_an_engine_can_judge_whole_subschemas() -> None:
    table = EnforcedKeywords(
        frozenset({"type", "items"}), nodes=(lambda node: "is an array" if node.types == {"array"} else None,)
    )
    assert problems({"type": "array", "items": {"type": "array"}}, table) == [
        "The schema at # is an array.",
        "The schema at #/items is an array.",
    ]


def test_there_are_never_more_sentences_than_anyone_reads() -> None:
    assert len(problems({"anyOf": [{"const": i} for i in range(50)]})) == 5


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{", "is not JSON"),
        ('{"a": NaN}', "is not JSON"),
        ("[]", "must be an object"),
        ("5", "must be an object"),
        ('{"type": "strin"}', "type at # must be one of null, boolean"),
        ('{"type": []}', "type at #"),
        ('{"enum": []}', "enum at # must be a list of values, not empty"),
        ('{"enum": 3}', "enum at #"),
        ('{"properties": {"a": {"minimum": "3"}}}', "minimum at #/properties/a must be a number, got '3'"),
        ('{"exclusiveMinimum": true}', "exclusiveMinimum at # must be a number"),
        ('{"maxLength": -1}', "maxLength at # must be an integer of at least 0"),
        ('{"minItems": 1.5}', "minItems at #"),
        ('{"multipleOf": 0}', "multipleOf at # must be a number above 0"),
        ('{"items": [{}]}', "items at # must be a schema"),
        ('{"properties": []}', "properties at # must be a mapping to schemas"),
        ('{"required": "a"}', "required at # must be a list of texts"),
        ('{"anyOf": []}', "anyOf at # must be a list of schemas"),
        ('{"dependencies": {}}', "dependencies at # is a keyword of an earlier draft"),
        ('{"$ref": "#/$defs/missing"}', "leads nowhere"),
        ('{"$ref": "https://example.org/schema"}', "leads nowhere"),
        ('{"$ref": "#nowhere"}', "leads nowhere"),
        ('{"$defs": {"a": 3}, "$ref": "#/$defs/a"}', "$defs at #"),
        ('{"x": [3], "$ref": "#/x/0"}', "leads nowhere"),
    ],
)
def test_malformed_schemas_are_refused_with_the_place(source: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match="The JSON schema is malformed") as raised:
        check_schema(source)
    assert message in str(raised.value)
    assert raised.value.param == "structured_outputs"


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 2_000, 200_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    source = '{"not":' * depth + "true" + "}" * depth
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        check_schema(source)


def test_a_large_schema_is_walked_once() -> None:
    schema = {
        "$defs": {"leaf": {"type": "string"}},
        "properties": {f"p{i}": {"$ref": "#/$defs/leaf"} for i in range(3_000)},
    }
    pointers = [node.pointer for node in SchemaDocument(schema).nodes()]
    assert len(pointers) == len(set(pointers)) == 3_002


def test_references_into_lists() -> None:
    check_schema('{"anyOf": [{"type": "null"}, {"items": {"$ref": "#/anyOf/0"}}]}')


def test_an_anchor_in_a_value_is_no_anchor() -> None:
    schema = {"$defs": {"v": {"enum": [{"$anchor": "a", "const": 1}]}, "s": {"$anchor": "a", "const": 2}}, "$ref": "#a"}
    assert SchemaDocument(schema).resolve("#a", "#").pointer == "#/$defs/s"
