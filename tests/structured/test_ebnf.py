"""Schemas and regular expressions as EBNF: what the texts of the grammar are, by a slow reader of our own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from llmkit_structured import ebnf_schema, ebnf_text
from llmkit_structured.ebnf_schema import schema_rules
from llmkit_structured.regex_syntax import whole
from llmkit_structured.schema_reader import read_schema
from llmkit_structured.schema_refusal import UnsupportedSchema

_TOKEN = re.compile(r'\s*(?:"((?:\\.|[^"\\])*)"|(\[(?:\\.|[^\]\\])*\])|([a-z_][a-z0-9_]*)|(\{\d+(?:,\d*)?\}|[()|?*+]))')
_ESCAPE = re.compile(r"\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")


class Ebnf:
    """Which beginnings of a text a rule can make up: enough to try small grammars."""

    def __init__(self, source: str) -> None:
        lines = [line.split("::=", 1) for line in source.splitlines() if line.strip()]
        self._rules = {name.strip(): self._parse(body) for name, body in lines}
        self._known: dict[tuple[int, str], frozenset[str]] = {}

    def accepts(self, text: str) -> bool:
        self._known.clear()
        return "" in self._rests(self._rules["root"], text)

    def _parse(self, body: str) -> Any:
        tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(body.rstrip()):
            match = _TOKEN.match(body, at)
            assert match, body[at:]
            kind = ("text", "set", "rule", "mark")[match.lastindex - 1]  # type: ignore[operator]
            tokens.append((kind, match[match.lastindex]))  # type: ignore[index]
            at = match.end()
        node, rest = self._options(tokens)
        assert not rest, rest
        return node

    def _options(self, tokens: list[tuple[str, str]]) -> tuple[Any, list[tuple[str, str]]]:
        options: list[Any] = [[]]
        while tokens and tokens[0] != ("mark", ")"):
            kind, value = tokens[0]
            tokens = tokens[1:]
            if (kind, value) == ("mark", "|"):
                options.append([])
                continue
            if (kind, value) == ("mark", "("):
                node, tokens = self._options(tokens)
                tokens = tokens[1:]
            elif kind == "text":
                node = ("text", _ESCAPE.sub(lambda m: chr(int(m[1] or m[2], 16)), value))
            elif kind == "set":
                node = ("set", re.compile(value))
            else:
                assert kind == "rule"
                node = ("rule", value)
            while tokens and tokens[0][0] == "mark" and tokens[0][1][0] in "?*+{":
                node = ("repeat", node, *_bounds(tokens[0][1]))
                tokens = tokens[1:]
            options[-1].append(node)
        return ("options", options), tokens

    def _rests(self, node: Any, text: str) -> frozenset[str]:
        """What is left of `text` after each way to take `node` from its beginning."""
        key = (id(node), text)
        if key not in self._known:
            self._known[key] = frozenset()
            self._known[key] = frozenset(self._taken(node, text))
        return self._known[key]

    def _taken(self, node: Any, text: str) -> Iterator[str]:
        kind = node[0]
        if kind == "text":
            if text.startswith(node[1]):
                yield text[len(node[1]) :]
        elif kind == "set":
            if node[1].match(text):
                yield text[1:]
        elif kind == "rule":
            yield from self._rests(self._rules[node[1]], text)
        elif kind == "options":
            for sequence in node[1]:
                rests = {text}
                for part in sequence:
                    rests = {after for rest in rests for after in self._rests(part, rest)}
                yield from rests
        else:
            _, part, low, high = node
            rests, count = {text}, 0
            while rests and (high is None or count <= high):
                if count >= low:
                    yield from rests
                rests = {after for rest in rests for after in self._rests(part, rest) if after != rest or count < low}
                count += 1


def _bounds(mark: str) -> tuple[int, int | None]:
    simple: dict[str, tuple[int, int | None]] = {"?": (0, 1), "*": (0, None), "+": (1, None)}
    if mark in simple:
        return simple[mark]
    low, comma, high = mark[1:-1].partition(",")
    return int(low), (int(high) if high else None) if comma else int(low)


def rules(schema: Any, spacing: Any = ebnf_schema.FIXED) -> Ebnf:
    return Ebnf(schema_rules(read_schema(json.dumps(schema)), spacing))


@pytest.mark.parametrize(
    ("expression", "texts", "others"),
    [
        ("a|bc", ["a", "bc"], ["", "ab", "abc"]),
        ("(ab){2,3}c?", ["abab", "abababc"], ["ab", "ababababc"]),
        (r"[\-\]^\\a-c]+", ["-]^\\", "abc"], ["", "d"]),
        (r'"\n\t\u00e9\u{1F336}', ['"\n\té🌶'], ['"']),
        ("", [""], ["a"]),
        (r"[^a]", ["b", "\n", "🌶"], ["a", ""]),
    ],
)
def test_regular_expressions(expression: str, texts: list[str], others: list[str]) -> None:
    grammar = Ebnf("root ::= " + ebnf_text.expression(whole(expression)))
    assert [text for text in texts if not grammar.accepts(text)] == []
    assert [text for text in others if grammar.accepts(text)] == []


def test_a_language_without_text_has_no_expression() -> None:
    with pytest.raises(ValueError, match="without any"):
        ebnf_text.expression(whole(r"a[^\s\S]"))


LIST = {"$ref": "#/$defs/n"}
OBJECT = {"a": {"type": "null"}, "b": {"type": "boolean"}, "c": {"type": "null"}}


@pytest.mark.parametrize(
    ("schema", "texts", "others"),
    [
        (
            {"type": "object", "properties": OBJECT, "required": ["b"]},
            ['{"b":true}', '{"a": null, "b": false}', '{"b":true,"c":null}', '{"a":null,"b":true,"c":null}'],
            ["{}", '{"a":null}', '{"b":true,"a":null}', '{"b":true,}', '{"b":true,"x":1}', '{"b":1}'],
        ),
        (
            {"type": "object", "properties": OBJECT},
            ["{}", '{"c":null}', '{"a":null,"c":null}'],
            ['{"c":null,"a":null}', '{,"c":null}', '{"a":null,}'],
        ),
        (
            {"type": "object", "properties": OBJECT, "minProperties": 2},
            ['{"a":null,"b":true}', '{"b":true,"c":null}', '{"a":null,"b":true,"c":null}'],
            ["{}", '{"a":null}', '{"c":null}'],
        ),
        (
            {"type": "object", "properties": OBJECT, "required": ["a"], "maxProperties": 2},
            ['{"a":null}', '{"a":null,"c":null}'],
            ['{"a":null,"b":true,"c":null}', "{}"],
        ),
        (
            {"properties": {"a": {"type": "null"}}, "type": "object", "additionalProperties": {"type": "boolean"}},
            ["{}", '{"a":null}', '{"x":true}', '{"a":null,"ab":true,"":false}'],
            ['{"a":true}', '{"a":null,"a":true}', '{"\\u0061":true}', '{"x":null}'],
        ),
        (
            {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1, "maxProperties": 2},
            ['{"x":null}', '{"x":null,"y":null}'],
            ["{}", '{"x":null,"y":null,"z":null}'],
        ),
        ({"type": "object", "additionalProperties": False}, ["{}"], ['{"a":1}']),
        ({"type": "object", "required": ["a"]}, ['{"a":1,"b":[]}', '{"a":{}}'], ["{}", '{"b":1}']),
        (
            {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": {"const": 3}, "minItems": 1},
            ["[1]", "[1,2]", "[1, 2, 3, 3]"],
            ["[]", "[2]", "[1,3]", "[1,2,]"],
        ),
        (
            {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 3},
            ["[1,1]", "[1,1,1]"],
            ["[1]", "[1,1,1,1]"],
        ),
        ({"type": "array", "prefixItems": [{"const": 1}], "items": False}, ["[]", "[1]"], ["[1,1]"]),
        ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
        ({"type": "array", "minItems": 2}, ["[1,null]", '["a",{},[]]'], ["[1]"]),
        (
            {"type": "string", "maxLength": 3},
            ['""', '"abc"', r'"\n\"\\"', r'"\u00e9"', r'"\ud83c\udf36xy"'],
            ['"abcd"', r'"\ud83c"'],
        ),
        ({"type": "string", "minLength": 2}, ['"ab"', '"abcdef"'], ['"a"', '""']),
        ({"type": "string", "minLength": 1, "maxLength": 2}, ['"a"', r'"a\t"'], ['""', '"abc"']),
        ({"type": "string", "maxLength": 33}, [f'"{"x" * 33}"'], [f'"{"x" * 34}"', '"\t"']),
        ({"type": "string", "maxLength": 0}, ['""'], ['"a"']),
        ({"type": "string"}, [r'"\/\b\f\n\r\t\u0000"', '"é🌶"'], ['"\n"', '"\\x"', r'"\udf36"', '"\ud800"']),
        ({"type": "string", "pattern": 'a"'}, [r'"xa\"y"'], ['"a"']),
        ({"type": "integer", "multipleOf": 7}, ["0", "7", "-21", "700"], ["1", "-0", "07", "71"]),
        ({"type": "integer", "multipleOf": 7, "minimum": -8, "maximum": 8}, ["-7", "0", "7"], ["14", "8"]),
        (
            {"const": {"a": [1, "é", None, 2.5, {}]}},
            ['{"a":[1,"é",null,2.5,{}]}', '{"a": [1, "é", null, 2.5, {}]}'],
            ['{"a":[]}'],
        ),
        ({"enum": [12345678901234567890, 1e30, True]}, ["12345678901234567890", "1e+30", "true"], ["1"]),
        (
            {"$defs": {"n": {"type": "object", "properties": {"next": {"anyOf": [LIST, {"type": "null"}]}},
             "required": ["next"]}}, **LIST},
            ['{"next":null}', '{"next":{"next":{"next":null}}}'],
            ["null", "{}", '{"next":{}}'],
        ),
        (
            {"$defs": {"n": {"properties": {"n": LIST}, "required": ["n"], "type": "object"}},
             "anyOf": [LIST, {"const": 1}]},
            ["1"],  # the other alternative would never end
            ["{", '{"n":1}'],
        ),
    ],
)  # fmt: skip
def test_schemas(schema: Any, texts: list[str], others: list[str]) -> None:
    grammar = rules(schema)
    assert [text for text in texts if not grammar.accepts(text)] == []
    assert [text for text in others if grammar.accepts(text)] == []


def test_blanks_stand_where_json_allows_them_and_nowhere_else() -> None:
    grammar = rules({"type": "object", "properties": {"a": {"type": "array", "items": {"const": 1}}}}, "[ ]{0,2}")
    assert all(map(grammar.accepts, ['{"a":[1,1]}', '{  "a"  :  [  1  ,  1  ]  }', "{  }", '{ "a" : [  ] }']))
    assert not any(map(grammar.accepts, [' {"a":[1]}', '{"a":[1]} ', '{   "a":[]}', '{"a":[1   ,1]}', '{"a":[1 1]}']))
    none = rules({"type": "array", "items": {"const": 1}}, ebnf_schema.NONE)
    assert none.accepts("[1,1]")
    assert not none.accepts("[1, 1]")


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "integer", "multipleOf": 7, "minimum": 0}, "multipleOf 7 is not supported with these bounds"),
        ({"type": "integer", "multipleOf": 7919}, "multipleOf 7919"),
        ({"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 2}, "minProperties 2"),
        ({"$defs": {"n": {"type": "array", "items": LIST, "minItems": 1}}, **LIST}, "finite"),
        ({"const": "\ud800"}, "surrogate"),
        ({"properties": {f"p{i}": {} for i in range(600)}, "type": "object", "maxProperties": 400}, "so many"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_refused(schema: Any, reason: str) -> None:
    with pytest.raises(UnsupportedSchema, match=reason):
        rules(schema)


def test_a_large_schema_is_written_in_linear_size() -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": 9} for i in range(1500)}}
    text = schema_rules(read_schema(json.dumps(schema)), ebnf_schema.FIXED)
    assert len(text) < 300_000
