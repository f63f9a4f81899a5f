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


JUDGED_CHARS = 4_096
"""Largest source that is judged at the door. Reading a schema takes time that grows with more than its length, and
those who wait for their tokens share the interpreter with the door."""


def grammar_request(constraint: StructuredOutputs, vocabulary: TokenVocabulary, max_whitespace: int) -> GrammarRequest:
    """The grammar of `constraint`, checked by `check_request` if it has at most JUDGED_CHARS characters. Raises
    InvalidRequestError for one that is malformed or too large."""
    json_grammar = partial(
        GrammarRequest,
        disable_any_whitespace=constraint.disable_any_whitespace,
        whitespace_pattern=constraint.whitespace_pattern,
        max_whitespace=max_whitespace,
    )
    kind = constraint.constraint
    if kind == "json":
        request = json_grammar("json_schema", _json_text(constraint.json, "json"))
    elif kind == "json_object":
        request = json_grammar("json_object", "")
    elif kind == "choice":
        request = GrammarRequest("choice", json.dumps(constraint.choice, ensure_ascii=False))
    elif kind == "structural_tag":
        request = json_grammar("structural_tag", _json_text(constraint.structural_tag, "structural_tag"))
    else:
        text = constraint.regex if kind == "regex" else constraint.grammar
        assert text is not None
        request = GrammarRequest("regex" if kind == "regex" else "grammar", text)
    if is_judged_at_the_door(request):
        check_request(request, vocabulary)
    return request


def is_judged_at_the_door(request: GrammarRequest) -> bool:
    """Whether it is small enough; otherwise it is judged where it is compiled."""
    return len(request.source) + len(request.whitespace_pattern or "") <= JUDGED_CHARS


def check_request(request: GrammarRequest, vocabulary: TokenVocabulary) -> None:
    """Raise InvalidRequestError if `request` is malformed, or asks for texts which `vocabulary` cannot write."""
    text = request.source
    if request.kind == "json_schema":
        document = SchemaDocument.parse(request.source)
        text = _dumped(document.root.schema, "json")  # without escapes
        if document.root.schema is False:
            raise InvalidRequestError("structured_outputs.json: false allows no answer.", param=PARAM)
        _check_writable(_literals(document), vocabulary)
    elif request.kind == "choice":
        _check_writable(((choice, choice) for choice in json.loads(request.source)), vocabulary)
    elif request.kind == "structural_tag":
        text = _dumped(_tag_object(request.source), "structural_tag")
    if request.kind != "choice":
        _check_unicode(text, "json" if request.kind == "json_schema" else request.kind)


def _json_text(value: str | dict[str, Any] | bool | None, field: str) -> str:
    """A schema or a structural tag as JSON text. A mapping becomes text first of all: what in it is no JSON shows then.
    Text that is too large to be judged here stays as it is."""
    if not isinstance(value, str):
        return _dumped(value, field)
    if len(value) > JUDGED_CHARS:
        return value
    return _dumped(SchemaDocument.parse(value).root.schema if field == "json" else _tag_object(value), field)


def _tag_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"structured_outputs.structural_tag is no JSON: {error}.", param=PARAM) from None
    if not isinstance(value, dict):
        raise InvalidRequestError(
            f"structured_outputs.structural_tag must be an object, got {shown(value)}.", param=PARAM
        )
    return value


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
