"""What the suite for grammar engines asks for: JSON schemas with values, and texts with what may follow them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SchemaCase:
    """A schema, values that meet it (keys in its order), and values that do not. An engine may refuse the schema; if it
    does not, it is held to both."""

    schema: Any
    valid: tuple[Any, ...]
    invalid: tuple[Any, ...]


def case(schema: Any, valid: list[Any], invalid: list[Any]) -> SchemaCase:
    """A SchemaCase from lists."""
    return SchemaCase(schema, tuple(valid), tuple(invalid))


NAME = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]}
DIGIT = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}

SCHEMAS: tuple[SchemaCase, ...] = (
    case({"type": "object", "required": ["a"]}, [{"a": 1}, {"a": {"b": []}}], [{}, {"b": 1}, []]),
    case({"type": "object", "patternProperties": {"^S_": {"type": "string"}}}, [{"S_1": "x"}, {}], [{"S_1": 1}]),
    case({"type": "array", "uniqueItems": True}, [[1, 2], []], [[1, 1], ["a", "a"]]),
    case({"type": "integer", "multipleOf": 7}, [0, 7, 14, -21], [1, 8, 70.5]),
    case({"type": "string", "pattern": "^[ab]+$", "maxLength": 3}, ["a", "aba"], ["", "abab", "abc"]),
    case({"type": "string", "pattern": "b"}, ["b", "abc", 'b"'], ["", "a"]),
    case({"type": "array", "minItems": 2}, [[1, "x"], [[], {}, None]], [[], [1]]),
    case({"not": {"type": "string"}}, [1, None, []], ["", "a"]),
    case({"not": {"const": 1}}, [2, "1"], [1]),
    case({"const": "a", "type": "string"}, ["a"], ["b", 1]),
    case({"const": 3, "type": "string"}, [], [3, "3"]),
    case({"type": "string", "pattern": "^a[^\\s\\S]b$"}, [], ["", "ab"]),
    case({"type": "object", "properties": {"a": {"type": "string", "pattern": "^[^\\s\\S]$"}},
          "additionalProperties": False}, [{}], [{"a": ""}, {"a": "x"}]),
    case({"type": "object", "additionalProperties": False}, [{}], [{"a": 1}, []]),
    case({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a"],
          "additionalProperties": False}, [{"a": 1}, {"a": 1, "b": True}], [{"b": True}, {}, {"a": 1, "c": 1}]),
    case({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}},
         [{}, {"a": 1}, {"b": None}], [{"a": "1"}, {"b": 0}]),
    case({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"x": 1, "y": 2}], [{"x": "1"}]),
    case({"type": "object", "minProperties": 1, "additionalProperties": {"type": "null"}}, [{"x": None}], [{}]),
    case({"type": "object", "minProperties": 2}, [{"x": 1, "y": 2}], [{}, {"x": 1}]),
    case({"type": "object", "maxProperties": 1, "additionalProperties": {"type": "null"}}, [{}, {"x": None}],
         [{"x": None, "y": None}]),
    case({"type": "object", "properties": {"x": {"type": "null"}, "a": {"type": "null"}}, "required": ["a", "b"],
          "maxProperties": 2}, [{"a": None, "b": 1}], [{"x": None, "a": None, "b": 1}, {"a": None}]),
    case({"type": "object", "properties": {'q"\\': {"type": "null"}, "é\n": {"type": "null"}},
          "required": ['q"\\', "é\n"], "additionalProperties": False}, [{'q"\\': None, "é\n": None}], [{}]),
    case({"enum": ["a", 'b"', "ü", 1, None, True, [1, "x"], {"k": []}]}, ["a", 'b"', "ü", 1, None, True, [1, "x"]],
         ["b", 2, False, [1]]),
    case({"enum": [1, "1"], "type": "integer"}, [1], ["1"]),
    case({"type": ["integer", "null"]}, [1, None], ["", 1.5, True]),
    case({"type": "integer"}, [0, -1, 123456789012], [1.5, "1", True]),
    case({"type": "number"}, [0, -1.5, 1e3, 0.001], ["1", None]),
    case({"type": "integer", "minimum": 0, "maximum": 9}, [0, 9], [-1, 10]),
    case({"type": "integer", "minimum": -10, "exclusiveMaximum": 123}, [-10, 0, 99, 122], [-11, 123, 1000]),
    case({"type": "number", "minimum": 0.5, "maximum": 1.25}, [0.5, 1, 1.25, 0.75], [0.4, 1.26, -1, 2]),
    case({"type": "integer", "maximum": 20_000_000_000}, [20_000_000_000, -5], [20_000_000_001]),
    case({"type": "integer", "maximum": 1e30, "minimum": 0}, [10**20], [-1, 10**31]),
    case({"type": "integer", "minimum": 5, "maximum": 3}, [], [3, 4, 5]),
    case({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "abc", "日本", "\n\n", '"\\'],
         ["", "a", "abcd", "日"]),
    case({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "24-1-1", ""]),
    case({"type": "string", "format": "uuid"}, ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08-aa98-11ea-b4aa"]),
    case({"type": "string", "format": "ipv4"}, ["127.0.0.1"], ["256.0.0.1", "1.2.3"]),
    case({"type": "array", "items": {"type": "integer"}, "maxItems": 2}, [[], [1], [1, 2]], [[1, 2, 3], ["a"]]),
    case({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 2},
         [[1, "a"]], [[], [1], [1, "a", 2], ["a", 1]]),
    case({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "array", "items": {"type": "null"}}]},
         ["ab", [], [None]], ["abc", [1], 1]),
    case({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]}, [1, 3.5], [3, 2.5]),
    case({"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 4}]}, [2, 4], [1, 5]),
    case({"if": {"type": "string"}, "then": {"minLength": 2}}, ["ab", 1], ["a"]),
    case({"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False},
         [{}, {"child": {"child": {}}}], [{"child": 1}]),
    case({"$ref": "#/$defs/p", "$defs": {"p": {"type": "array", "items": {"$ref": "#/$defs/q"}}, "q": {"const": 1}}},
         [[], [1, 1]], [[2], 1]),
    case({"type": "object", "properties": {"a": {"type": "array", "contains": {"const": 1}}}},
         [{"a": [1]}, {"a": [2, 1]}], [{"a": []}, {"a": [2]}]),
    case({"type": "object", "dependentRequired": {"a": ["b"]}}, [{"a": 1, "b": 2}, {}], [{"a": 1}]),
    case({"type": "object", "propertyNames": {"maxLength": 1}}, [{"a": 1}], [{"ab": 1}]),
    case({"type": "string", "description": "no constraint", "examples": [1], "x-extra": True}, ["a", ""], [1]),
    case(NAME, [{"name": ""}, {"name": "a" * 12}], [{"name": "a" * 13}, {}, {"name": 1}]),
    case(DIGIT, [{"n": 0}, {"n": 9}], [{"n": 10}, {}, {"n": -1}]),
)  # fmt: skip

MALFORMED: tuple[Any, ...] = (
    *([], "object", 3, None, {"type": "objct"}, {"type": 3}, {"properties": []}, {"required": "a"}, {"required": [1]}),
    *(
        {"minimum": "1"},
        {"maxLength": -1},
        {"maxLength": 1.5},
        {"enum": {}},
        {"anyOf": {}},
        {"anyOf": []},
        {"items": 3},
    ),
    *({"pattern": "("}, {"pattern": 3}, {"$ref": "#/nowhere"}, {"$ref": 3}, {"$ref": "http://localhost/x.json"}),
    *({"$ref": "#"}, {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, {"allOf": [{"$ref": "#"}]}, {"const": "\ud800"}),
)
"""Schemas that have to be refused, by whatever words."""

REFUSED_REGEXES = ("(", "[a", "a{2,1}", "*", "(?P<n>a", "\\", "a[^\\s\\S]b", "[^\\s\\S]+")
REGEXES = (
    "a", "", "ab|abc", "(a|ab)(c|bcd)?", "[ab]{2,3}", "a?b?c?", "(?:ab){1,2}c", "[^\\x00-`d-\\U0010ffff]{1,2}", "a\\.b",
    "(a|b)*?c{0,1}", "^ab$", "é|日", "日本?",
)  # fmt: skip
"""Regular expressions, read by Python's `re`; languages over a, b, c, full stop, and two other letters."""

CHOICES = (
    ["yes", "no", "maybe"],
    ["a", "ab", "abc", "b"],
    ["x"],
    ['quote "', "back\\slash", "new\nline", "日本", "", " "],
    ["true", "null", "nul"],
)
