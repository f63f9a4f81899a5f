"""The keywords of JSON Schema, draft 2020-12: what kind of value each needs, and to which types of instance it applies.

Source: https://json-schema.org/draft/2020-12, core and validation vocabularies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

ANNOTATIONS = frozenset(
    (
        "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema",
        "$id", "$anchor", "$vocabulary", "$defs", "definitions", "contentEncoding", "contentMediaType", "contentSchema",
    )
)  # fmt: skip
"""Keywords that forbid nothing."""

HARMLESS_FORMATS = frozenset(("password", "path", "file-path", "directory-path", "binary"))
"""Formats that any text has."""

OF_TYPE: Mapping[str, frozenset[str]] = {
    "number": frozenset(("multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum")),
    "string": frozenset(("maxLength", "minLength", "pattern", "format")),
    "array": frozenset(
        (
            "items", "prefixItems", "contains", "minContains", "maxContains", "maxItems", "minItems", "uniqueItems",
            "unevaluatedItems",
        )
    ),
    "object": frozenset(
        (
            "properties", "patternProperties", "additionalProperties", "propertyNames", "required", "minProperties",
            "maxProperties", "dependentRequired", "dependentSchemas", "unevaluatedProperties",
        )
    ),
}  # fmt: skip
"""Type of instance → keywords that say nothing about instances of other types; those of "number" apply to integers."""

ANY_TYPE = frozenset(
    (
        "type", "enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef",
        "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor",
    )
)  # fmt: skip
"""Keywords about instances of every type."""

OLDER: Mapping[str, str] = {
    "additionalItems": "items beside prefixItems",
    "dependencies": "dependentRequired or dependentSchemas",
    "divisibleBy": "multipleOf",
    "disallow": "not",
    "extends": "allOf",
}
"""Keywords of earlier drafts that would forbid something there → what to write instead."""

ASSERTIONS = ANY_TYPE.union(*OF_TYPE.values(), OLDER)
"""Every keyword that can forbid something. All others are annotations, and have no effect by the specification."""

ONE = (
    "not", "if", "then", "else", "additionalProperties", "propertyNames", "unevaluatedProperties", "items", "contains",
    "unevaluatedItems",
)  # fmt: skip
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
MAPPINGS = ("properties", "patternProperties", "dependentSchemas")
"""Keywords whose value is one schema, a list of schemas, a mapping from a name to a schema."""


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)  # type: ignore[operator,call-overload]


def _is_type(value: object) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


def _is_schema(value: object) -> bool:
    return isinstance(value, (dict, bool))


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _all_schemas(values: Any) -> bool:
    return all(_is_schema(value) for value in values)


_Form = tuple[Callable[[Any], bool], str]

_TEXT: _Form = (lambda value: isinstance(value, str), "a text")
_FLAG: _Form = (lambda value: isinstance(value, bool), "true or false")
_NUMBER: _Form = (_is_number, "a number")
_COUNT: _Form = (_is_count, "an integer of at least 0")
_SCHEMA: _Form = (_is_schema, "a schema (an object, true or false)")
_SCHEMAS: _Form = (lambda value: isinstance(value, list) and bool(value) and _all_schemas(value), "a list of schemas")
_SCHEMA_MAP: _Form = (lambda value: isinstance(value, dict) and _all_schemas(value.values()), "a mapping to schemas")

_COUNTED = ("Length", "Items", "Properties", "Contains")

FORMS: Mapping[str, _Form] = {
    "type": (_is_type, f"one of {', '.join(TYPES)}, or a list of them"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list of values, not empty"),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "required": (_are_texts, "a list of texts"),
    "dependentRequired": (
        lambda value: isinstance(value, dict) and all(_are_texts(names) for names in value.values()),
        "a mapping to lists of texts",
    ),
    "uniqueItems": _FLAG,
    **dict.fromkeys(("maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum"), _NUMBER),
    **dict.fromkeys((f"{limit}{what}" for limit in ("min", "max") for what in _COUNTED), _COUNT),
    **dict.fromkeys(("pattern", "format", "$ref", "$id", "$anchor", "$dynamicRef", "$dynamicAnchor"), _TEXT),
    **dict.fromkeys(ONE, _SCHEMA),
    **dict.fromkeys(LISTS, _SCHEMAS),
    **dict.fromkeys((*MAPPINGS, "$defs", "definitions"), _SCHEMA_MAP),
}  # fmt: skip
"""Keyword → whether a value has the form that it needs, and what that form is called."""
