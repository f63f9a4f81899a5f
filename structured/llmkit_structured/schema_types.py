"""The keywords of JSON schema that belong to one type each: numbers, strings, arrays, objects."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from llmkit_structured import formats
from llmkit_structured.regex_syntax import MalformedRegex, UnsupportedRegex, found_in
from llmkit_structured.schema_form import (
    ANY,
    NOTHING,
    Array,
    Boolean,
    Form,
    Null,
    Number,
    Object,
    Pattern,
    String,
    exact_number,
    union,
)
from llmkit_structured.schema_refusal import refuse

Schema = dict[str, Any]
Child = Callable[[Any, str], Form]

KEYWORDS = frozenset(
    (
        "type",
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("minLength", "maxLength", "pattern", "format"),
        *("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains", "maxContains"),
        *("properties", "additionalProperties", "required", "minProperties", "maxProperties", "patternProperties"),
        "propertyNames",
    )
)
MAX_EXPONENT = 400
MAX_COUNT = 2**31


def form_of_types(schema: Schema, path: str, child: Child) -> Form:
    """What the keywords of the types allow, `type` included."""
    types = _types(schema, path)
    forms: list[Form] = []
    if "null" in types:
        forms.append(Null())
    if "boolean" in types:
        forms.append(Boolean())
    number = _number(schema, path)
    if "number" in types:
        forms.append(number)
    elif "integer" in types:
        forms.append(_integer(schema, number))
    string = _string(schema, path)
    if "string" in types:
        forms.append(string)
    array = _array(schema, path, child)
    if "array" in types:
        forms.append(array)
    made = _object(schema, path, child)
    if "object" in types:
        forms.append(made)
    form = union(forms)
    return ANY if form == ANY else form


_TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")


def _types(schema: Schema, path: str) -> tuple[str, ...]:
    given = schema.get("type", _TYPES)
    types = (given,) if isinstance(given, str) else given
    if not isinstance(types, (list, tuple)) or not types or any(one not in _TYPES for one in types):
        refuse(f"{path}/type", f"type must be one or several of {', '.join(_TYPES)}")
    return tuple(types)


def _is_number(value: object) -> bool:
    """Of any size: there are integers for which there is no float."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _decimal(schema: Schema, keyword: str, path: str) -> Decimal | None:
    value = schema.get(keyword)
    if value is None and keyword not in schema:
        return None
    if not _is_number(value):
        refuse(f"{path}/{keyword}", f"{keyword} must be a number")
    exact = exact_number(value)
    if abs(exact.adjusted()) > MAX_EXPONENT:
        refuse(f"{path}/{keyword}", f"{keyword} is beyond every number that can be written")
    return exact


def _count(schema: Schema, keyword: str, path: str) -> int | None:
    value = schema.get(keyword)
    if value is None and keyword not in schema:
        return None
    if not _is_number(value) or value != int(value) or value < 0:
        refuse(f"{path}/{keyword}", f"{keyword} must be a whole number, 0 or more")
    return min(int(value), MAX_COUNT)


def _number(schema: Schema, path: str) -> Number:
    low, above = _decimal(schema, "minimum", path), _decimal(schema, "exclusiveMinimum", path)
    high, below = _decimal(schema, "maximum", path), _decimal(schema, "exclusiveMaximum", path)
    low_open = above is not None and (low is None or above >= low)
    high_open = below is not None and (high is None or below <= high)
    multiple = _decimal(schema, "multipleOf", path)
    if multiple is not None and multiple <= 0:
        refuse(f"{path}/multipleOf", "multipleOf must be above 0")
    if multiple is not None and Decimal(float(multiple)) != multiple:
        # What is a multiple of 0.01 is another thing to those who divide binary fractions, as most validators do.
        refuse(f"{path}/multipleOf", f"multipleOf {multiple}, which is no binary fraction")
    return Number(above if low_open else low, below if high_open else high, low_open, high_open, False, multiple)


def _integer(schema: Schema, number: Number) -> Form:
    from llmkit_structured.schema_merge import intersect

    whole = Number(number.low, number.high, number.low_open, number.high_open, True, number.multiple_of)
    bounds = formats.INTEGER_BOUNDS.get(str(schema.get("format")))
    if bounds is None:
        return whole
    return intersect(whole, Number(Decimal(bounds[0]), Decimal(bounds[1])), {})


def _string(schema: Schema, path: str) -> Form:
    patterns = []
    if "pattern" in schema:
        source = schema["pattern"]
        if not isinstance(source, str):
            refuse(f"{path}/pattern", "pattern must be a text")
        try:
            patterns.append(Pattern(found_in(source), "pattern", source))
        except MalformedRegex as error:
            refuse(f"{path}/pattern", f"pattern is not a regular expression: {error}")
        except UnsupportedRegex as error:
            refuse(f"{path}/pattern", f"pattern with {error}")
    if "format" in schema:
        name = schema["format"]
        language = formats.language(name) if isinstance(name, str) else None
        if language is not None:
            patterns.append(Pattern(language, "format", name))
        elif name not in formats.KNOWN:
            refuse(f"{path}/format", f"the format {name!r} is unknown")
        elif name in formats.INTEGER_BOUNDS and _types(schema, path) != ("integer",):
            refuse(f"{path}/format", f"the format {name!r} beside another type than integer")
    low, high = _count(schema, "minLength", path) or 0, _count(schema, "maxLength", path)
    return String(low, high, tuple(patterns)) if high is None or low <= high else NOTHING


def _array(schema: Schema, path: str, child: Child) -> Form:
    prefix = schema.get("prefixItems", [])
    if not isinstance(prefix, list):
        refuse(f"{path}/prefixItems", "prefixItems must be a list of schemas")
    forms = tuple(child(one, f"{path}/prefixItems/{i}") for i, one in enumerate(prefix))
    rest: Form = ANY
    for keyword in ("unevaluatedItems", "items"):
        if keyword in schema:
            if isinstance(schema[keyword], list):
                refuse(f"{path}/{keyword}", f"{keyword} as a list of schemas, which draft 2020-12 calls prefixItems")
            rest = child(schema[keyword], f"{path}/{keyword}")
    low, high = _count(schema, "minItems", path) or 0, _count(schema, "maxItems", path)
    low = max(low, _contained(schema, path, child))
    unique = schema.get("uniqueItems", False)
    if not isinstance(unique, bool):
        refuse(f"{path}/uniqueItems", "uniqueItems must be true or false")
    if high is not None and low > high:
        return NOTHING
    return Array(forms, None if rest == ANY else rest, low, high, unique)


def _contained(schema: Schema, path: str, child: Child) -> int:
    """The least number of items because of `contains`, if that says no more than a number."""
    least, most = _count(schema, "minContains", path), _count(schema, "maxContains", path)
    if "contains" not in schema:
        return 0
    if most is not None or (least != 0 and child(schema["contains"], f"{path}/contains") != ANY):
        refuse(f"{path}/contains", "contains is not supported")
    return 1 if least is None else least


def _object(schema: Schema, path: str, child: Child) -> Form:
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        refuse(f"{path}/properties", "properties must be an object of schemas")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        refuse(f"{path}/required", "required must be a list of texts")
    for keyword, harmless in _REFUSED.items():
        if keyword in schema and schema[keyword] not in harmless:
            refuse(f"{path}/{keyword}", f"{keyword} is not supported")
    forms = tuple((name, child(value, f"{path}/properties/{escaped(name)}")) for name, value in properties.items())
    rest: Form = ANY
    for keyword in ("unevaluatedProperties", "additionalProperties"):
        if keyword in schema:
            rest = child(schema[keyword], f"{path}/{keyword}")
    low, high = _count(schema, "minProperties", path) or 0, _count(schema, "maxProperties", path)
    if high is not None and low > high:
        return NOTHING
    silent = bool(properties) and _SPEAKS_OF_OTHERS.isdisjoint(schema)
    names = tuple(dict.fromkeys(required))
    return Object(forms, names, None if rest == ANY else rest, silent, low, high)


_SPEAKS_OF_OTHERS = frozenset({"additionalProperties", "unevaluatedProperties", "dependentSchemas"})
_REFUSED: dict[str, tuple[Any, ...]] = {
    "patternProperties": ({},),
    "propertyNames": ({}, True),
}


def escaped(name: str) -> str:
    """`name` as a step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
