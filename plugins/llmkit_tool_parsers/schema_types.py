"""What a tool's schema says of its parameters, for formats that do not tell texts from other values themselves."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmkit.answers.tools import parameters_of
from llmkit_tool_parsers.marks import quoted

ANY = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})

_TYPES: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
_ROOT_KEYS = ("$defs", "definitions")
_MAX_DEPTH = 8
_FLOAT_OF_INTEGER = re.compile(r"-?\d+\.0+")


def properties_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Parameter → its schema, which can be read on its own."""
    schema = parameters_of(tool)
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    shared = {key: schema[key] for key in _ROOT_KEYS if key in schema}
    return {
        str(name): {**shared, **inner} if isinstance(inner, Mapping) else inner for name, inner in properties.items()
    }


def required_of(tool: Mapping[str, Any]) -> frozenset[str]:
    """The parameters that a call must have."""
    required = parameters_of(tool).get("required")
    return (
        frozenset(filter(lambda name: isinstance(name, str), required)) if isinstance(required, list) else frozenset()
    )


def types_of(schema: Any, root: Any = None, depth: int = 0) -> frozenset[str]:
    """The JSON types that a value of `schema` may have; all where the schema does not say."""
    root = schema if root is None else root
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return ANY
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({given}) & ANY or ANY
    if isinstance(given, list):
        return frozenset(one for one in given if isinstance(one, str)) & ANY or ANY
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return frozenset(name for value in schema["enum"] for name in _TYPES.get(type(value), ANY))
    if "const" in schema:
        return frozenset(_TYPES.get(type(schema["const"]), ANY))
    if isinstance(schema.get("$ref"), str):
        return types_of(_resolved(schema["$ref"], root), root, depth + 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            return frozenset().union(*(types_of(one, root, depth + 1) for one in schema[key]))
    return ANY


def _resolved(reference: str, root: Any) -> Any:
    if not reference.startswith("#/"):
        return None
    value = root
    for part in reference[2:].split("/"):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def json_of(text: str, types: frozenset[str]) -> str:
    """The JSON text of a value that was written without quotes. JSON of one of the types stays as it is written, also
    Python's True, False and None are known; all else is a string."""
    written = text.strip()
    written = _PYTHON_NAMES.get(written, written)
    try:
        value = json.loads(written, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return quoted(text)
    if types.isdisjoint(_TYPES.get(type(value), ())):
        if "integer" in types and _FLOAT_OF_INTEGER.fullmatch(written):
            return written.partition(".")[0]
        return quoted(text)
    return quoted(text) if isinstance(value, str) and "string" in types and types != ANY else written


def _refuse(name: str) -> Sequence[Any]:
    raise ValueError(name)
