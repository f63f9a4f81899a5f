"""From a request's `structured_outputs` to what a grammar engine compiles. Whatever is wrong whichever engine gets it
is refused here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from llmkit.errors import InvalidRequestError, shown
from llmkit.grammars.schema_document import PARAM, SchemaDocument, malformed
from llmkit.hookspecs.structured import GrammarRequest
from llmkit.requests.structured_outputs import MAX_SOURCE_CHARS, StructuredOutputs

if TYPE_CHECKING:
    from llmkit.frontend.token_vocabulary import TokenVocabulary


def grammar_request(constraint: StructuredOutputs, vocabulary: TokenVocabulary, max_whitespace: int) -> GrammarRequest:
    """The grammar of `constraint`. Raises InvalidRequestError for a malformed one, and for one that asks for texts
    which `vocabulary` cannot write."""
    json_grammar = partial(
        GrammarRequest,
        disable_any_whitespace=constraint.disable_any_whitespace,
        whitespace_pattern=constraint.whitespace_pattern,
        max_whitespace=max_whitespace,
    )
    kind = constraint.constraint
    if kind == "json":
        source = _schema(constraint.json)
        document = SchemaDocument.parse(source)
        if document.root.schema is False:
            raise InvalidRequestError("structured_outputs.json: false allows no answer.", param=PARAM)
        _check_writable(_literals(document), vocabulary)
        _check_unicode(source, "json")
        return json_grammar("json_schema", source)
    if kind == "json_object":
        return json_grammar("json_object", "")
    if kind == "choice":
        _check_writable(((choice, choice) for choice in constraint.choice or ()), vocabulary)
        return GrammarRequest("choice", json.dumps(constraint.choice, ensure_ascii=False))
    if kind == "structural_tag":
        return json_grammar("structural_tag", _structural_tag(constraint.structural_tag))
    text = constraint.regex if kind == "regex" else constraint.grammar
    assert text is not None
    _check_unicode(text, kind)
    return GrammarRequest("regex" if kind == "regex" else "grammar", text)


def _schema(schema: str | dict[str, Any] | bool | None) -> str:
    """The schema as JSON text. A mapping becomes text first of all: what in it is no JSON shows then."""
    return _dumped(SchemaDocument.parse(schema).root.schema if isinstance(schema, str) else schema, "json")


def _dumped(value: Any, field: str) -> str:
    """As JSON text; equal schemas give equal texts, and the order of properties, which the answer follows, is kept."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise malformed("it is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"structured_outputs.{field} is no JSON: {error}.", param=PARAM) from error
    if len(text) > MAX_SOURCE_CHARS:
        raise InvalidRequestError(
            f"structured_outputs.{field} must have at most {MAX_SOURCE_CHARS} characters of JSON, got {len(text)}.",
            param=PARAM,
        )
    return text


def _structural_tag(value: str | dict[str, Any] | None) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"structured_outputs.structural_tag is no JSON: {error}.", param=PARAM) from None
    if not isinstance(value, dict):
        raise InvalidRequestError(
            f"structured_outputs.structural_tag must be an object, got {shown(value)}.", param=PARAM
        )
    text = _dumped(value, "structural_tag")
    _check_unicode(text, "structural_tag")
    return text


def _check_unicode(text: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(
            f"structured_outputs.{field} is not valid Unicode: it holds half of a surrogate pair.", param=PARAM
        ) from None


def _literals(document: SchemaDocument) -> Iterator[tuple[Any, str]]:
    """(value, text) of everything that an answer may have to hold literally: values of enum and const, and required
    names."""
    for node in document.nodes():
        schema = node.schema
        if isinstance(schema, bool):
            continue
        values = [
            *schema.get("enum", ()),
            *([schema["const"]] if "const" in schema else ()),
            *schema.get("required", ()),
        ]
        for value in values:
            if not isinstance(value, (int, float)):
                yield value, json.dumps(value, ensure_ascii=False)


def _check_writable(literals: Iterable[tuple[Any, str]], vocabulary: TokenVocabulary) -> None:
    for value, text in literals:
        if not vocabulary.can_write(text):
            raise InvalidRequestError(
                f"structured_outputs asks for {shown(value)}, which holds bytes that this model has no token for.",
                param=PARAM,
            )
