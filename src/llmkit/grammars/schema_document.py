"""A JSON schema as a document: parsed, its references resolved, its subschemas visited one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from llmkit.errors import InvalidRequestError, shown
from llmkit.grammars import schema_keywords as keywords

MAX_DEPTH = 128
"""Deepest nesting of a schema, in subschemas. Engines follow it by recursion."""

PARAM = "structured_outputs"

Schema = dict[str, Any] | bool


@dataclass(frozen=True)
class SchemaNode:
    """One subschema. pointer: where it stands, as "#/properties/name"; the root is "#"."""

    document: SchemaDocument
    schema: Schema
    pointer: str
    depth: int = 0

    @property
    def types(self) -> frozenset[str]:
        """The types of instance that `type` allows; all if it says nothing. "number" includes integers."""
        stated = self.schema.get("type") if isinstance(self.schema, dict) else None
        if stated is None:
            return frozenset(keywords.TYPES) - {"integer"}
        return frozenset([stated] if isinstance(stated, str) else stated)

    def has_effect(self, keyword: str) -> bool:
        """Whether the value that an assertion keyword has here can forbid any instance that `type` allows."""
        assert isinstance(self.schema, dict)
        types = self.types | ({"number"} if "integer" in self.types else frozenset())
        if any(keyword in of_type and kind not in types for kind, of_type in keywords.OF_TYPE.items()):
            return False
        return not _forbids_nothing(keyword, self.schema)

    def children(self) -> Iterator[tuple[str, SchemaNode]]:
        """(keyword, subschema) of everything that stands directly in this schema and has an effect; references are not
        followed, and `$defs` is left out."""
        schema = self.schema
        if isinstance(schema, bool):
            return
        for keyword, value in schema.items():
            if keyword in keywords.ASSERTIONS and not self.has_effect(keyword):
                continue
            if keyword in keywords.ONE:
                yield keyword, self._child(value, keyword)
            elif keyword in keywords.LISTS:
                for i, item in enumerate(value):
                    yield keyword, self._child(item, keyword, str(i))
            elif keyword in keywords.MAPPINGS:
                for name, item in value.items():
                    yield keyword, self._child(item, keyword, name)

    def subschemas(self) -> Iterator[SchemaNode]:
        """Every object that stands directly in this schema where a schema belongs, of effect or not, `$defs` included;
        what looks like a schema elsewhere, as in `enum`, is a value."""
        assert isinstance(self.schema, dict)
        for keyword, value in self.schema.items():
            if keyword in keywords.ONE:
                yield self._child(value, keyword)
            elif keyword in keywords.LISTS and isinstance(value, list):
                yield from (self._child(item, keyword, str(i)) for i, item in enumerate(value))
            elif keyword in (*keywords.MAPPINGS, "$defs", "definitions") and isinstance(value, dict):
                yield from (self._child(item, keyword, name) for name, item in value.items())

    def referenced(self) -> SchemaNode | None:
        """What `$ref` means; None without one. Raises InvalidRequestError if it leads nowhere."""
        if isinstance(self.schema, bool) or "$ref" not in self.schema:
            return None
        return self.document.resolve(self.schema["$ref"], self.pointer)

    def _child(self, schema: Schema, *steps: str) -> SchemaNode:
        path = "/".join(step.replace("~", "~0").replace("/", "~1") for step in steps)
        return SchemaNode(self.document, schema, f"{self.pointer}/{path}", self.depth + 1)

    def check_form(self) -> None:
        """Raise InvalidRequestError if a keyword here has a value that it cannot have."""
        if isinstance(self.schema, bool):
            return
        for keyword, value in self.schema.items():
            form = keywords.FORMS.get(keyword)
            if form is not None and not form[0](value):
                raise malformed(f"{keyword} at {self.pointer} must be {form[1]}, got {shown(value, 60)}")
            if keyword in keywords.OLDER:
                raise malformed(
                    f"{keyword} at {self.pointer} is a keyword of an earlier draft; "
                    f"write {keywords.OLDER[keyword]} instead"
                )


class SchemaDocument:
    """A whole schema. References may only point into it."""

    def __init__(self, root: Any) -> None:
        if not isinstance(root, (dict, bool)):
            raise malformed(f"it must be an object, true or false, got {shown(root, 60)}")
        self.root = SchemaNode(self, root, "#")
        self._resolved: dict[str, SchemaNode] = {}
        self._anchors: dict[str, SchemaNode] | None = None

    @classmethod
    def parse(cls, source: str) -> SchemaDocument:
        """Raises InvalidRequestError for what is no JSON, or nested too deeply."""
        try:
            return cls(json.loads(source, parse_constant=_no_constant))
        except RecursionError:
            raise malformed(f"it is nested too deeply; at most {MAX_DEPTH} subschemas are allowed") from None
        except ValueError as error:
            raise malformed(f"it is not JSON ({error})") from None

    def nodes(self) -> Iterator[SchemaNode]:
        """Every subschema that can decide about an instance, each once, in the order of the document; those that only
        a reference leads to come after the one that refers to them. Checks the form of each on the way.

        Raises InvalidRequestError for a malformed keyword, a reference that leads nowhere, and too deep a nesting.
        """
        seen: set[str] = set()
        stack = [self.root]
        while stack:
            node = stack.pop()
            if node.pointer in seen:
                continue
            seen.add(node.pointer)
            if node.depth > MAX_DEPTH:
                raise malformed(f"it is nested too deeply; at most {MAX_DEPTH} subschemas are allowed")
            node.check_form()
            yield node
            below = [child for _, child in node.children()]
            target = node.referenced()
            stack += [*reversed(below), target] if target is not None else reversed(below)

    def resolve(self, reference: str, pointer: str) -> SchemaNode:
        """What a `$ref` at `pointer` means. Raises InvalidRequestError if that is not in this document."""
        known = self._resolved.get(reference)
        if known is None:
            known = self._resolved[reference] = self._find(reference, pointer)
        return known

    def _find(self, reference: str, pointer: str) -> SchemaNode:
        schema = self.root.schema
        own_id = schema.get("$id") if isinstance(schema, dict) else None
        local = reference
        if isinstance(own_id, str) and own_id and reference.startswith(own_id.rstrip("#")):
            local = reference[len(own_id.rstrip("#")) :] or "#"
        if local.startswith("#") and not local.startswith(("#/", "##")) and local != "#":
            found = self._by_anchor().get(unquote(local[1:]))
        elif local == "#" or local.startswith("#/"):
            found = self._at(local)
        else:
            found = None
        if found is None:
            raise malformed(f"$ref at {pointer} leads nowhere in this schema: {shown(reference)}")
        return found

    def _at(self, local: str) -> SchemaNode | None:
        value: Any = self.root.schema
        steps = local[2:].split("/") if local != "#" else []
        for step in steps:
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and key in value:
                value = value[key]
            elif isinstance(value, list) and key.isascii() and key.isdigit() and int(key) < len(value):
                value = value[int(key)]
            else:
                return None
        canonical = "/".join(["#", *(unquote(step) for step in steps)])
        return SchemaNode(self, value, canonical) if isinstance(value, (dict, bool)) else None

    def _by_anchor(self) -> dict[str, SchemaNode]:
        if self._anchors is None:
            self._anchors = {}
            stack = [self.root]
            while stack:
                node = stack.pop()
                if isinstance(node.schema, dict):
                    name = node.schema.get("$anchor")
                    if isinstance(name, str):
                        self._anchors.setdefault(name, node)
                    stack += node.subschemas()
        return self._anchors


_LOWER_LIMITS = ("minLength", "minItems", "minProperties")
_EMPTY_MEANS_NOTHING = (
    "uniqueItems", "required", "dependentRequired", "dependentSchemas", "patternProperties", "properties",
)  # fmt: skip
_TRUE_MEANS_NOTHING = ("items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties")


def _forbids_nothing(keyword: str, schema: dict[str, Any]) -> bool:
    value = schema[keyword]
    if keyword in _LOWER_LIMITS:
        return bool(value == 0)
    if keyword in ("then", "else"):
        return "if" not in schema
    if keyword == "if":
        return "then" not in schema and "else" not in schema
    if keyword in ("minContains", "maxContains"):
        return "contains" not in schema
    if keyword == "contains":
        return schema.get("minContains") == 0 and "maxContains" not in schema
    if keyword in ("$dynamicAnchor", "$recursiveAnchor"):
        return True  # a name for $dynamicRef, and no more
    return (keyword in _EMPTY_MEANS_NOTHING and not value) or (keyword in _TRUE_MEANS_NOTHING and value is True)


def malformed(what: str) -> InvalidRequestError:
    """The error for a schema that is none."""
    return InvalidRequestError(f"The JSON schema is malformed: {what}.", param=PARAM)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
