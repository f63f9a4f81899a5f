"""JSON schemas are read exactly, or refused with the keyword and its place."""

from __future__ import annotations

import contextlib
import json
import random
import time
from typing import Any

import jsonschema
import pytest

from llmkit_structured.schema_form import ANY, Object, accepts
from llmkit_structured.schema_reader import read_schema
from llmkit_structured.schema_refusal import UnsupportedSchema

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 7, 14, 2.5, 1.0, 1e30, "", "a", "ab", "abab", "x1", "2024-02-29", "2023-02-29",
    [], [1], [1, 2], [1, 1], ["a", 1], [[], {}], {}, {"a": 1}, {"a": "x"}, {"a": 1, "b": 2}, {"b": True}, {"c": None},
    {"kind": "dog", "barks": True}, {"kind": "cat", "barks": True}, {"kind": "cat", "lives": 9}, {"a": {"a": {"a": 1}}},
]  # fmt: skip

SCHEMAS: list[Any] = [
    True,
    {},
    {"type": "object", "required": ["a"]},
    {"multipleOf": 7},
    {"type": "string", "pattern": "^[ab]+$", "maxLength": 3},
    {"minItems": 2},
    {"const": 1},
    {"type": "string", "const": "a"},
    {"type": "integer", "enum": [1, "a", 2.5]},
    {"additionalProperties": False},
    {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "boolean"}},
    {"type": ["integer", "null"]},
    {"minimum": 0, "exclusiveMaximum": 7},
    {"type": "integer", "minimum": 0.5},
    {"allOf": [{"properties": {"a": {"type": "integer"}}}, {"required": ["a"]}]},
    {"allOf": [{"minimum": 1}, {"maximum": 7}], "type": "number"},
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
    {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    {
        "oneOf": [
            {"properties": {"kind": {"const": "dog"}, "barks": {"type": "boolean"}}, "required": ["kind"]},
            {"properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind", "lives"]},
        ],
        "type": "object",
    },
    {"not": {"type": ["string", "object"]}},
    {"enum": [1, "a", None], "not": {"const": "a"}},
    {"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"type": "array"}},
    {"then": {"type": "string"}},
    {"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "additionalProperties": {"$ref": "#/$defs/node"}}}},
    {"$ref": "#/$defs/a", "maximum": 3, "$defs": {"a": {"type": "number"}}},
    {"properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
    {"$defs": {"x": {"$anchor": "here", "type": "boolean"}}, "$ref": "#here"},
    {"prefixItems": [{"type": "integer"}], "items": {"type": "integer"}},
    {"prefixItems": [{"type": "string"}], "items": False},
    {"uniqueItems": True},
    {"contains": {}},
    {"minProperties": 1, "maxProperties": 1},
    {"format": "date", "type": "string"},
    {"type": "array", "unevaluatedItems": {"type": "integer"}},
    {"title": "x", "description": "y", "default": 3, "x-order": 1, "unknown": 2, "type": "number"},
    {"minimum": 20_000_000_000, "type": "integer"},
    {"maximum": 1e30, "type": "integer"},
    {"dependentRequired": {"a": ["b"], "kind": ["lives"]}},
    {"dependentRequired": {"a": []}},
    {"dependentSchemas": {"a": {"properties": {"a": {"type": "integer"}}}, "b": {"minProperties": 2}}},
    {"dependentSchemas": {"a": False}, "properties": {"a": {}, "b": {}}},
    {"not": {"minimum": 3, "exclusiveMaximum": 14}},
    {"not": {"enum": [1, "a", "ab", True, None]}},
    {"not": {"minLength": 1, "maxLength": 2}},
    {"not": {"minItems": 1}},
    {"not": {"required": ["a"], "properties": {"b": {"type": "boolean"}}}},
    {"not": {"type": "object", "properties": {"a": {"properties": {"a": {"const": 1}}, "required": ["a"]}}}},
    {"oneOf": [{"minimum": 1}, {"maximum": 2}]},
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"maxProperties": 0, "type": "object"}], "type": "object"},
    {"oneOf": [{"minLength": 1}, {"maxLength": 2}, {"const": "abab"}]},
    {
        "if": {"properties": {"kind": {"const": "dog"}}, "required": ["kind"]},
        "then": {"required": ["barks"]},
        "else": {"not": {"required": ["barks"]}},
        "type": "object",
    },
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
def test_a_form_accepts_what_the_schema_does(schema: Any) -> None:
    read = read_schema(json.dumps(schema))
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    for value in VALUES:
        assert accepts(read.root, value, read.definitions) == validator.is_valid(value), value


@pytest.mark.parametrize(
    ("schema", "place", "reason"),
    [
        ({"type": "object", "patternProperties": {"^S_": {}}}, "#/patternProperties", "patternProperties"),
        ({"properties": {"a": {"contains": {"type": "null"}}}}, "#/properties/a/contains", "contains"),
        ({"oneOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, "#/oneOf", "may both hold"),
        ({"not": {"type": "integer"}}, "#/not", "not, of what has no opposite"),
        ({"not": {"enum": [[1]]}}, "#/not", "not, of what has no opposite"),
        ({"if": {"items": {"minimum": 3}}, "then": False}, "#/if", "not, of what has no opposite"),
        ({"dependentRequired": {"a": "b"}}, "#/dependentRequired", "lists of texts"),
        ({"dependentSchemas": []}, "#/dependentSchemas", "must be an object"),
        ({"dependentSchemas": {"a/b": 3}}, "#/dependentSchemas/a~1b", "must be an object"),
        ({"nullable": True}, "#/nullable", "'nullable' is not supported"),
        ({"$ref": "other.json"}, "#/$ref", "not in this schema"),
        ({"$ref": "#/$defs/x"}, "#/$ref", "not in this schema"),
        ({"$ref": "#"}, "#", "leads to itself"),
        ({"allOf": [{"$ref": "#"}, {"type": "object"}]}, "#", "back to itself"),
        ({"minimum": 3, "maximum": 2, "type": "number"}, "#", "no value"),
        ({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2}, "#", "no value"),
        ({"type": "strnig"}, "#/type", "type must be"),
        ({"minimum": "3"}, "#/minimum", "must be a number"),
        ({"maxLength": -1}, "#/maxLength", "whole number"),
        ({"required": "a"}, "#/required", "list of texts"),
        ({"enum": "a"}, "#/enum", "must be a list"),
        ({"enum": []}, "#", "no value"),
        ({"items": [{}]}, "#/items", "prefixItems"),
        ({"format": "zip-code"}, "#/format", "format"),
        ({"pattern": "(?=a)"}, "#/pattern", "look-ahead"),
        ({"$schema": "http://example.com/mine"}, "#/$schema", "dialect"),
        ({"properties": {"a": {"$id": "x"}}}, "#/properties/a/$id", "identity"),
        ({"unevaluatedProperties": False, "allOf": [{}]}, "#/unevaluatedProperties", "evaluate in place"),
        ([], "#", "must be an object"),
        ({"properties": {"a~/b": {"contains": {"const": 1}}}}, "#/properties/a~0~1b/contains", "contains"),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_what_has_no_exact_counterpart_is_refused_by_name(schema: Any, place: str, reason: str) -> None:
    with pytest.raises(UnsupportedSchema, match=reason) as refused:
        read_schema(json.dumps(schema))
    assert refused.value.place == place


def test_depth_and_breadth_have_bounds() -> None:
    deep: Any = {}
    for _ in range(300):
        deep = {"items": deep}
    with pytest.raises(UnsupportedSchema, match="nested"):
        read_schema(json.dumps(deep))
    with pytest.raises(UnsupportedSchema, match="nested"):
        read_schema("[" * 100_000)
    wide = {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(4)]} for i in range(8)]}
    with pytest.raises(UnsupportedSchema, match="too many"):
        read_schema(json.dumps(wide))


def test_values_are_held_against_patterns_without_trying_every_way() -> None:
    """This one hung a server for good: expressions were tried on the values by backtracking, with its interpreter."""
    source = json.dumps({"enum": ["a" * 200, "a" * 200 + "b", "b"], "pattern": "^(a|aa)+$"})
    start = time.thread_time()
    assert read_schema(source).root == read_schema(json.dumps({"const": "a" * 200})).root
    assert time.thread_time() - start < 1


def test_properties_keep_their_order_and_silence_is_noted() -> None:
    read = read_schema(
        '{"properties": {"b": true, "a": true}, "allOf": [{"properties": {"c": true}}], "type": "object"}'
    )
    assert isinstance(read.root, Object)
    assert [name for name, _ in read.root.properties] == ["b", "a", "c"]
    assert read.root.open_by_silence
    closed = read_schema('{"properties": {"a": true}, "additionalProperties": false, "type": "object"}').root
    assert isinstance(closed, Object)
    assert not closed.open_by_silence
    assert read_schema("{}").root == ANY


def _random_schema(random_: random.Random, depth: int = 0) -> Any:
    kind = random_.randrange(9 if depth < 2 else 5)
    inner = [_random_schema(random_, depth + 1) for _ in range(2)] if kind >= 5 else []
    return [
        {"type": random_.choice(["string", "integer", "number", "boolean", "null", "array", "object"])},
        {"enum": random_.sample([1, 2.5, "a", "ab", None, True, [1], {"a": 1}], 3)},
        {"minimum": random_.choice([-1, 0, 1.5]), "maximum": random_.choice([2, 7, 14.5])},
        {"minLength": random_.randrange(3)},
        {"type": random_.choice([["string", "null"], ["integer", "array"]])},
        {"properties": {"a": inner and inner[0], "b": inner and inner[-1]}, "required": random_.choice([[], ["a"]])},
        {"anyOf": inner},
        {"allOf": inner},
        {"items": inner and inner[0], "maxItems": 2},
    ][kind]


def test_random_schemas_are_read_exactly() -> None:
    random_ = random.Random(3)
    for _ in range(400):
        schema = _random_schema(random_)
        validator = jsonschema.Draft202012Validator(schema)
        try:
            read = read_schema(json.dumps(schema))
        except UnsupportedSchema:
            assert not any(map(validator.is_valid, VALUES)), schema
            continue
        for value in VALUES:
            assert accepts(read.root, value, read.definitions) == validator.is_valid(value), (schema, value)


def nested(depth: int) -> Any:
    """Pairs of overlapping alternatives within one another: their opposites multiply."""
    if depth == 0:
        return {"minimum": 0}
    return {"oneOf": [{"properties": {"a": nested(depth - 1)}}, {"properties": {"b": nested(depth - 1)}}]}


def test_alternatives_that_explode_are_refused_while_they_are_read() -> None:
    start = time.thread_time()
    with pytest.raises(UnsupportedSchema, match="multiply to too many"):
        read_schema(json.dumps(nested(12)))
    assert time.thread_time() - start < 5.0  # a tenth of that; without the limit it would take for ever


@pytest.mark.parametrize(
    "text",
    [
        '{"maximum": 1%s}' % ("0" * 400),
        '{"multipleOf": 1%s}' % ("0" * 400),
        '{"enum": [1%s, 2], "maximum": 5}' % ("0" * 400),
        '{"minLength": 1e999}',
        '{"maxItems": NaN}',
    ],
)
def test_numbers_that_are_no_floats_are_read_or_refused(text: str) -> None:
    with contextlib.suppress(UnsupportedSchema):  # what else is raised counts as a fault of the engine
        read_schema(text)
