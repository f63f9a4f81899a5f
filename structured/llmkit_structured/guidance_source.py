"""Requests → grammars in llguidance's own format (JSON text), or the reason why not."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

from llmkit.hookspecs.structured import GrammarRequest
from llmkit_structured.regex_tree import pattern
from llmkit_structured.request_text import UnsupportedRequest, blanks_tree, choices, regex_tree, schema_of
from llmkit_structured.schema_form import Form, Literal, Number, Object
from llmkit_structured.schema_reader import ReadSchema, read_schema
from llmkit_structured.schema_refusal import UnsupportedSchema, refuse
from llmkit_structured.schema_writer import Schema, SchemaWriter, Written
from llmkit_structured.structural_tags import Tag, read_tags

BLANK_CLASS = r"[\x20\x0A\x0D\x09]"
_INLINE_SCHEMA = re.compile(r"%json\s*")
_EXACT = 2**53
_SMALLEST, _LARGEST = Decimal("0.0001"), Decimal(10**6)


def source_of(request: GrammarRequest, *, forbid_undeclared: bool) -> str:
    """The grammar of `request`. Raises UnsupportedRequest. For kind grammar it is the text itself, which only the
    library can read, with the JSON schemas in it made as exact as others are."""
    if request.kind == "grammar":
        return _with_schemas(request, forbid_undeclared=forbid_undeclared)
    if request.kind == "regex":
        return lark(f"start: {_terminal(pattern(regex_tree(request.source)))}\n")
    if request.kind == "choice":
        return lark("start: " + " | ".join(map(lark_text, choices(request))) + "\n")
    if request.kind == "structural_tag":
        return _tags(request, forbid_undeclared=forbid_undeclared)
    schema = _schema(request, schema_of(request), forbid_undeclared=forbid_undeclared)
    return lark(f"start: %json {json.dumps(schema, ensure_ascii=False)}\n")


def _with_schemas(request: GrammarRequest, *, forbid_undeclared: bool) -> str:
    """The text of a Lark grammar in which the schema after each `%json` is replaced."""
    before, *pieces = _INLINE_SCHEMA.split(request.source)
    for piece in pieces:
        try:
            given, end = json.JSONDecoder().raw_decode(piece)
        except (ValueError, RecursionError):
            raise UnsupportedRequest("The grammar has %json without a JSON schema after it.") from None
        schema = _read(json.dumps(given), "The JSON schema in the grammar")
        written = _schema(request, schema, forbid_undeclared=forbid_undeclared)
        before += f"%json {json.dumps(written, ensure_ascii=False)}{piece[end:]}"
    return before


def _read(source: str, name: str) -> ReadSchema:
    try:
        return read_schema(source)
    except UnsupportedSchema as error:
        raise UnsupportedRequest(f"{name} cannot be expressed: {error}.") from None


def lark(grammar: str) -> str:
    """A grammar in Lark's syntax, for the library. Without the option, a text that can only go on in one way would
    have to go on in the tokens of the library's choice."""
    return json.dumps({"grammars": [{"lark_grammar": f'%llguidance {{"no_forcing": true}}\n{grammar}'}]})


def _schema(request: GrammarRequest, schema: ReadSchema, *, forbid_undeclared: bool) -> Schema:
    try:
        written = _Writer(schema, forbid_undeclared=forbid_undeclared).document()
    except UnsupportedSchema as error:
        raise UnsupportedRequest(f"The JSON schema cannot be expressed: {error}.") from None
    return {"x-guidance": _layout(request), **written}


def _layout(request: GrammarRequest) -> dict[str, Any]:
    """What may stand between the tokens of JSON, in the words of llguidance."""
    tree = blanks_tree(request)
    if tree is not None:
        return {"whitespace_pattern": pattern(tree)}
    if request.disable_any_whitespace:
        return {"whitespace_flexible": False, "item_separator": r",\x20?", "key_separator": r":\x20?"}
    if request.max_whitespace == 0:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": f"{BLANK_CLASS}{{1,{request.max_whitespace}}}"}


class _Writer(SchemaWriter):
    """Refuses what llguidance would round, or not enforce."""

    def number(self, form: Number) -> Schema:
        for bound in (form.low, form.high):
            if bound is not None and abs(bound) > _EXACT:
                refuse("#", f"a bound beyond 2^53, {bound}, which would be rounded")
            if bound is not None and not form.integer and bound != bound.to_integral_value():
                # llguidance 1.9 leaves out numbers with fewer places than the bound, and allows some beyond it.
                refuse("#", f"the bound {bound} for a number that may have decimal places")
        if form.multiple_of is not None and not _SMALLEST <= form.multiple_of <= _LARGEST:
            refuse("#", f"multipleOf {form.multiple_of}, which is too large or too small")
        return super().number(form)

    def object(self, form: Object) -> Schema:
        # Names that the schema does not list may be written twice, and would be counted twice.
        if form.low > max(1, len(form.required)) or (form.low > len(form.required) > 0):
            refuse("#", f"minProperties {form.low} beside {len(form.required)} required ones")
        return super().object(form)

    def write(self, form: Form) -> Written:
        if isinstance(form, Literal) and isinstance(form.value, (int, float)) and abs(form.value) > _EXACT:
            refuse("#", f"the constant {form.text:.40}, which would be rounded")
        return super().write(form)


def _tags(request: GrammarRequest, *, forbid_undeclared: bool) -> str:
    """Free text in which each trigger begins one of the tags: a lazy lexeme ends where the trigger ends."""
    tags = read_tags(request.source)
    rules = []
    for i, tag in enumerate(tags):
        content = json.dumps(_tag_schema(request, tag, forbid_undeclared), ensure_ascii=False)
        begin = tag.begin.removeprefix(tag.trigger)
        parts = [f"tag_{i}_trigger", *([lark_text(begin)] if begin else []), f"%json {content}"]
        parts += [lark_text(tag.end)] if tag.end else []
        rules.append(f"tag_{i}_trigger[lazy]: TEXT {lark_text(tag.trigger)}\ntag_{i}: {' '.join(parts)}\n")
    names = " | ".join(f"tag_{i}" for i in range(len(tags)))
    head = f"start: ({names})* tail\ntail: TEXT\nTEXT: /(.|\\n)*/\n"
    return lark(head + "".join(rules))


def _tag_schema(request: GrammarRequest, tag: Tag, forbid_undeclared: bool) -> Schema:
    schema = _read(tag.schema, f"The schema of the tag {tag.begin!r:.40}")
    return _schema(request, schema, forbid_undeclared=forbid_undeclared)


def lark_text(literal: str) -> str:
    """A literal of Lark, which reads JSON's escapes."""
    return json.dumps(literal, ensure_ascii=False)


def _terminal(expression: str) -> str:
    """A regular expression of Lark; an empty one is written as an empty literal."""
    escaped = expression.replace("/", "\\/")
    return f"/{escaped}/" if expression else '""'
