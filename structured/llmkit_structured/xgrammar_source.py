"""Requests → what XGrammar compiles, or the reason why not.

Schemas and regular expressions are written as EBNF here: XGrammar's own readers pass over what they do not know
(uniqueItems, multipleOf with a bound, maxLength beside pattern …), or write strings that are no JSON.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from llmkit.hookspecs.structured import GrammarRequest
from llmkit_structured import ebnf_schema, ebnf_text
from llmkit_structured.ebnf_schema import Blanks, schema_rules
from llmkit_structured.regex_tree import repeat
from llmkit_structured.request_text import BLANKS, UnsupportedRequest, blanks_tree, choices, regex_tree, schema_of
from llmkit_structured.schema_reader import ReadSchema, read_schema
from llmkit_structured.schema_refusal import UnsupportedSchema
from llmkit_structured.structural_tags import read_tags

MAX_DEPTH = 64
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


@dataclass(frozen=True)
class Source:
    """Text in one of XGrammar's notations."""

    notation: Literal["ebnf", "lark", "structural_tag"]
    text: str


def source_of(request: GrammarRequest) -> Source:
    """The grammar of `request`. Raises UnsupportedRequest."""
    if request.kind == "grammar":
        return _as_it_is(request.source)
    if request.kind == "structural_tag":
        return Source("structural_tag", json.dumps(_structural_tag(request), ensure_ascii=False))
    if request.kind == "choice":
        return Source("ebnf", "root ::= " + " | ".join(map(ebnf_text.literal, choices(request))) + "\n")
    if request.kind == "regex":
        return Source("ebnf", _regex_rules(request.source, "regex"))
    return Source("ebnf", _schema_rules(request, schema_of(request)))


def _as_it_is(source: str) -> Source:
    if "::=" not in source:
        return Source("lark", source)
    _check_escapes(source)
    return Source("ebnf", source)


def _check_escapes(source: str) -> None:
    """Of a code that is no character, half of a surrogate pair or beyond the last, the library makes bytes that are no
    text."""
    for escape in _ESCAPE.finditer(source):
        code = int(escape[1] or escape[2] or "0", 16)
        if 0xD800 <= code <= 0xDFFF or code > sys.maxunicode:
            raise UnsupportedRequest(f"grammar has {escape[0]}, which is no character.")


def _regex_rules(source: str, name: str) -> str:
    try:
        return f"root ::= {ebnf_text.expression(regex_tree(source, name))}\n"
    except ValueError as error:
        if isinstance(error, UnsupportedRequest):
            raise
        raise UnsupportedRequest(f"{name} matches no text at all.") from None


def _schema_rules(request: GrammarRequest, schema: ReadSchema) -> str:
    try:
        return schema_rules(schema, _spacing(request))
    except UnsupportedSchema as error:
        raise UnsupportedRequest(f"The JSON schema cannot be expressed: {error}.") from None


def _spacing(request: GrammarRequest) -> Blanks | str:
    """What may stand between the tokens of JSON; an expression, where it is the same everywhere."""
    tree = blanks_tree(request)
    if tree is not None:
        return ebnf_text.expression(tree)
    if request.max_whitespace == 0:
        return ebnf_schema.NONE
    if request.disable_any_whitespace:
        return ebnf_schema.FIXED
    return ebnf_text.expression(repeat(BLANKS, 0, request.max_whitespace))


# ---- structural tags

_PLAIN: Mapping[str, tuple[str, ...]] = {
    "const_string": ("value",),
    "any_text": ("excludes",),
    "triggered_tags": ("triggers", "at_least_one", "stop_after_first", "excludes"),
    "tags_with_separator": ("separator", "at_least_one", "stop_after_first"),
    "tag": ("begin", "end"),
    "repeat": ("min", "max"),
    "sequence": (),
    "or": (),
    "optional": (),
    "plus": (),
    "star": (),
}
"""Type of format → its fields that are taken as they are."""


def _structural_tag(request: GrammarRequest) -> dict[str, Any]:
    given = json.loads(request.source)
    if not isinstance(given, dict):
        raise UnsupportedRequest("structural_tag must be an object.")
    if "format" in given:
        return {"type": "structural_tag", "format": _format(request, given["format"], 0)}
    tags = read_tags(request.source)
    written = [
        {"type": "tag", "begin": tag.begin, "content": _content(request, tag.schema), "end": tag.end} for tag in tags
    ]
    triggers = list(dict.fromkeys(tag.trigger for tag in tags))
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": triggers, "tags": written}}


def _format(request: GrammarRequest, given: Any, depth: int) -> dict[str, Any]:
    """One format with the formats in it; schemas and regular expressions become grammars."""
    kind = given.get("type") if isinstance(given, dict) else None
    if depth > MAX_DEPTH:
        raise UnsupportedRequest("structural_tag nests too deeply.")
    if kind == "json_schema":
        _only(given, ("type", "json_schema", "style"))
        if given.get("style", "json") != "json":
            raise UnsupportedRequest(f"structural_tag: the style {given['style']!r:.40} of JSON is not supported.")
        return _content(request, json.dumps(given.get("json_schema", True)))
    if kind == "regex":
        _only(given, ("type", "pattern"))
        pattern = given.get("pattern")
        if not isinstance(pattern, str):
            raise UnsupportedRequest("structural_tag: a format of type regex needs a text `pattern`.")
        return {"type": "grammar", "grammar": _regex_rules(pattern, "structural_tag: the pattern")}
    if kind == "grammar":
        _only(given, ("type", "grammar", "syntax"))
        if isinstance(given.get("grammar"), str):
            _check_escapes(given["grammar"])
        return dict(given)
    if not isinstance(kind, str) or kind not in _PLAIN:
        raise UnsupportedRequest(f"structural_tag: the format {kind!r:.40} is not supported.")
    parts = ("content", "elements", "tags")
    _only(given, ("type", *_PLAIN[kind], *parts))
    for name in _PLAIN[kind]:
        _check_texts(name, given.get(name, ""))
    written = {name: given[name] for name in ("type", *_PLAIN[kind]) if name in given}
    for name in parts:
        if name in given:
            inner = given[name]
            many = isinstance(inner, list)
            formats = [_format(request, one, depth + 1) for one in (inner if many else [inner])]
            written[name] = formats if many else formats[0]
    return written


def _only(given: dict[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise UnsupportedRequest(f"structural_tag: {name!r:.40} in a format {given['type']} is not supported.")


def _check_texts(name: str, value: Any) -> None:
    """Tokens by their id are not text, which is what a grammar is about."""
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, (str, int)):
            raise UnsupportedRequest(f"structural_tag: {name} must be a text or a list of texts.")


def _content(request: GrammarRequest, schema: str) -> dict[str, Any]:
    try:
        read = read_schema(schema)
    except UnsupportedSchema as error:
        raise UnsupportedRequest(f"A JSON schema in structural_tag cannot be expressed: {error}.") from None
    return {"type": "grammar", "grammar": _schema_rules(request, read)}
