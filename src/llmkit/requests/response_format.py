"""The constraint of a request as clients of servers write it: `structured_outputs`, OpenAI's `response_format`, and the
older `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmkit.errors import InvalidRequestError, shown
from llmkit.requests.structured_outputs import StructuredOutputs, structured_outputs

TYPES = ("text", "json_object", "json_schema", "structural_tag")

GUIDED = {
    "guided_json": "json",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Older name of a constraint → field of StructuredOutputs."""

FIELDS = ("structured_outputs", "response_format", *GUIDED, "guided_whitespace_pattern")
"""Every field of a request's body that `constraint_of` reads."""


def constraint_of(body: Mapping[str, Any]) -> StructuredOutputs | None:
    """The one constraint that a request's body asks for; None if it asks for none. Other fields are not looked at.

    Raises InvalidRequestError whose `param` is the field, for a malformed one and for two that both constrain.
    """
    given = {name: body[name] for name in FIELDS if body.get(name) is not None}
    guided = {name: given[name] for name in GUIDED if name in given and given[name] is not False}
    found: dict[str, StructuredOutputs] = {}
    if "structured_outputs" in given:
        constraint = structured_outputs(given["structured_outputs"])
        assert constraint is not None
        found["structured_outputs"] = constraint
    if "response_format" in given:
        constraint = response_format(given["response_format"])
        if constraint is not None:
            found["response_format"] = constraint
    for name, value in guided.items():
        found[name] = _guided(name, value, given.get("guided_whitespace_pattern"))
    if len(found) > 1:
        names = " and ".join(found)
        raise InvalidRequestError(f"{names} both constrain the answer; give one of them.", param=list(found)[-1])
    if "guided_whitespace_pattern" in given and not guided:
        raise InvalidRequestError(
            "guided_whitespace_pattern goes with guided_json or guided_json_object only.",
            param="guided_whitespace_pattern",
        )
    return next(iter(found.values()), None)


def response_format(value: Any) -> StructuredOutputs | None:
    """The constraint of a `response_format`; None for type text. Raises InvalidRequestError with param
    response_format."""
    if not isinstance(value, Mapping):
        raise _refused(f"must be an object with a type, got {shown(value)}")
    kind = value.get("type")
    if kind not in TYPES:
        raise _refused(f"has the type {shown(kind)}; it must be one of {', '.join(TYPES)}")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    try:
        if kind == "structural_tag":
            return StructuredOutputs(structural_tag=dict(value))
        return StructuredOutputs(json=_schema(value))
    except InvalidRequestError as error:
        if error.param == "response_format":
            raise
        raise _refused(f"is malformed: {error.message.rstrip('.')}") from error


def _schema(value: Mapping[str, Any]) -> Any:
    if "json_schema" not in value:
        where = " The schema stands one level too high." if "schema" in value else ""
        raise _refused(f"of type json_schema needs json_schema, an object with name and schema.{where}")
    inner = value["json_schema"]
    if not isinstance(inner, Mapping):
        raise _refused(f"has json_schema {shown(inner)}; it must be an object with name and schema")
    schema = inner.get("schema")
    if not isinstance(schema, Mapping) and schema is not True:
        raise _refused(f"has json_schema.schema {shown(schema)}; it must be a JSON schema, an object")
    if not isinstance(inner.get("strict", False), bool | None):
        raise _refused(f"has json_schema.strict {shown(inner['strict'])}; it must be true or false")
    return dict(schema) if isinstance(schema, Mapping) else schema


def _guided(name: str, value: Any, whitespace_pattern: Any) -> StructuredOutputs:
    fields = {GUIDED[name]: value}
    if whitespace_pattern is not None and name in ("guided_json", "guided_json_object"):
        fields["whitespace_pattern"] = whitespace_pattern
    try:
        constraint = structured_outputs(fields)
    except InvalidRequestError as error:
        message = error.message.replace(f"structured_outputs.{GUIDED[name]}", name)
        raise InvalidRequestError(message, param=name) from error
    assert constraint is not None
    return constraint


def _refused(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"response_format {what.rstrip('.')}.", param="response_format")
