"""JSON schema (draft 2020-12) → forms, or a reason why not.

Every keyword that can forbid anything is understood exactly, or refused by name with the place where it stands. What a
schema allows and how it is written are separate matters: the order of properties, for one, is for the engines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmkit.errors import InvalidRequestError
from llmkit.grammars.schema_document import SchemaDocument
from llmkit.grammars.schema_keywords import ASSERTIONS
from llmkit_structured import schema_types
from llmkit_structured.schema_form import (
    ANY,
    NOTHING,
    Definitions,
    Form,
    Literal,
    Object,
    Reference,
    Union,
    accepts,
    union,
)
from llmkit_structured.schema_merge import TooManyOptions, intersect, limited_work, literal
from llmkit_structured.schema_opposite import complement, open_to_others
from llmkit_structured.schema_refusal import refuse
from llmkit_structured.schema_solve import disjoint, without_empty

MAX_DEPTH = 100

COMBINATORS = ("$ref", "const", "enum", "allOf", "anyOf", "oneOf", "not", "if", "dependentRequired", "dependentSchemas")
UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")
_ASSERTIONS = (ASSERTIONS | {"nullable"}) - {"$dynamicAnchor", "$recursiveAnchor"}
_DIALECT = re.compile(r"https?://json-schema\.org/(draft(/2019-09|/2020-12|-0[4-9])/schema#?|schema#?)?")
_NO_OBJECT = tuple(
    option for option in (ANY.options if isinstance(ANY, Union) else ()) if not isinstance(option, Object)
)
_IN_PLACE = frozenset({"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "contains"})


@dataclass(frozen=True)
class ReadSchema:
    """A schema as forms. root: the form of the whole; definitions: those that references name."""

    root: Form
    definitions: Definitions


def read_schema(source: str) -> ReadSchema:
    """The forms of the schema `source`, JSON text. Raises UnsupportedSchema: malformed, not expressible, or without
    any value that it allows."""
    try:
        schema = json.loads(source, parse_constant=lambda name: refuse("#", f"{name} is not JSON"))
    except RecursionError:
        refuse("#", "nested too deeply")
    reader = _Reader(schema)
    with limited_work():
        root = reader.read(schema, "#", 0)
        reader.read_the_rest()
    if root == NOTHING:
        refuse("#", "no value meets the schema")
    return ReadSchema(root, reader.definitions)


class _Reader(Mapping[str, Form]):
    """Reads schemas; as a mapping it gives the form of a definition, read when it is first asked for."""

    def __init__(self, schema: Any) -> None:
        self._document = SchemaDocument(schema if isinstance(schema, dict) else {})
        self.definitions: dict[str, Form] = {}
        self._wanted: dict[str, Any] = {}
        self._being_read: set[str] = set()

    def __getitem__(self, name: str) -> Form:
        if name not in self.definitions:
            if name in self._being_read:
                refuse(name, "a $ref that leads back to itself is beside other keywords")
            self._being_read.add(name)
            self.definitions[name] = self.read(self._wanted[name], name, 0)
            self._being_read.discard(name)
        return self.definitions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._wanted)

    def __len__(self) -> int:
        return len(self._wanted)

    def read_the_rest(self) -> None:
        """Read what is referred to and has not been needed yet; then no reference may lead to itself at once."""
        done = 0
        while done < len(self._wanted):
            names = list(self._wanted)
            for name in names[done:]:
                _ = self[name]
            done = len(names)
        for name in self._wanted:
            self._check_progress(name, name, set())

    def _check_progress(self, start: str, name: str, seen: set[str]) -> None:
        form = self.definitions[name]
        for option in form.options if isinstance(form, Union) else (form,):
            if isinstance(option, Reference):
                if option.name == start:
                    refuse(start, "a $ref that leads to itself without anything between")
                if option.name not in seen:
                    seen.add(option.name)
                    self._check_progress(start, option.name, seen)

    def read(self, schema: Any, path: str, depth: int) -> Form:
        """The form of the subschema at `path`, a JSON pointer."""
        if depth > MAX_DEPTH:
            refuse(path, f"schemas nested more than {MAX_DEPTH} deep")
        if isinstance(schema, bool):
            return ANY if schema else NOTHING
        if not isinstance(schema, dict):
            refuse(path, "a schema must be an object, true or false")
        self._check_keywords(schema, path)
        child: Callable[[Any, str], Form] = lambda value, place: self.read(value, place, depth + 1)  # noqa: E731
        try:
            form = schema_types.form_of_types(schema, path, child)
            for keyword in schema:
                if keyword in COMBINATORS:
                    form = intersect(form, self._combined(keyword, schema, path, child, form), self)
        except TooManyOptions as error:
            refuse(path, str(error))
        return without_empty(form)

    def _check_keywords(self, schema: dict[str, Any], path: str) -> None:
        dialect = schema.get("$schema", "https://json-schema.org/")
        if not isinstance(dialect, str) or not _DIALECT.fullmatch(dialect):
            refuse(f"{path}/$schema", f"the dialect {dialect!r:.80} is unknown")
        for keyword in schema:
            if keyword == "$id" and path != "#":
                refuse(f"{path}/$id", "a schema with an identity of its own inside another one")
            if keyword in UNEVALUATED:
                if not _IN_PLACE.isdisjoint(schema):
                    refuse(f"{path}/{keyword}", f"{keyword} beside keywords that evaluate in place")
                continue
            supported = keyword in COMBINATORS or keyword in schema_types.KEYWORDS or keyword in ("then", "else")
            if keyword in _ASSERTIONS and not supported:
                refuse(f"{path}/{keyword}", f"the keyword {keyword!r} is not supported")

    def _combined(
        self, keyword: str, schema: dict[str, Any], path: str, child: Callable[[Any, str], Form], so_far: Form
    ) -> Form:
        value, place = schema[keyword], f"{path}/{keyword}"
        if keyword == "$ref":
            return self._reference(value, place)
        if keyword == "const":
            return literal(value)
        if keyword == "enum":
            if not isinstance(value, list):
                refuse(place, "enum must be a list")
            return union([literal(one) for one in value])
        if keyword == "not":
            return self._without(child(value, place), so_far, place)
        if keyword == "if":
            return self._condition(schema, path, child, so_far)
        if keyword.startswith("dependent"):
            return self._dependent(keyword, value, place, child)
        if not isinstance(value, list) or not value:
            refuse(place, f"{keyword} must be a list of schemas")
        forms = [child(one, f"{place}/{i}") for i, one in enumerate(value)]
        if keyword == "allOf":
            whole: Form = ANY
            for form in forms:
                whole = intersect(whole, form, self)
            return whole
        return union(self._only_one(forms, so_far, place) if keyword == "oneOf" else forms)

    def _only_one(self, forms: list[Form], so_far: Form, place: str) -> list[Form]:
        """Each of `forms` without what others of them hold as well."""
        within = [intersect(so_far, form, self) for form in forms]
        alone = list(forms)
        for i, form in enumerate(within):
            for j in range(i):
                if not disjoint(form, within[j], self):
                    for one, other in ((i, j), (j, i)):
                        opposite = complement(open_to_others(forms[other]), self)
                        if opposite is None:
                            refuse(place, f"oneOf whose alternatives {j} and {i} may both hold")
                        alone[one] = intersect(alone[one], opposite, self)
        return alone

    def _dependent(self, keyword: str, value: Any, place: str, child: Callable[[Any, str], Form]) -> Form:
        """Objects that have a certain property must have others as well, or meet a schema."""
        if not isinstance(value, dict):
            refuse(place, f"{keyword} must be an object")
        whole: Form = ANY
        for name, needed in value.items():
            if keyword == "dependentSchemas":
                then = child(needed, f"{place}/{schema_types.escaped(name)}")
            elif isinstance(needed, list) and all(isinstance(other, str) for other in needed):
                then = Object(required=tuple(dict.fromkeys(needed)))
            else:
                refuse(place, f"{keyword} must hold lists of texts")
            without, having = Object(((name, NOTHING),)), intersect(Object(required=(name,)), then, self)
            whole = intersect(whole, union([*_NO_OBJECT, without, having]), self)
        return whole

    def _without(self, form: Form, so_far: Form, place: str) -> Form:
        options = so_far.options if isinstance(so_far, Union) else (so_far,)
        if options and all(isinstance(option, Literal) for option in options):
            return union([o for o in options if isinstance(o, Literal) and not accepts(form, o.value, self)])
        opposite = complement(open_to_others(form), self)
        if opposite is None:
            if disjoint(form, so_far, self):
                return ANY
            refuse(place, "not, of what has no opposite")
        return opposite

    def _condition(self, schema: dict[str, Any], path: str, child: Callable[[Any, str], Form], so_far: Form) -> Form:
        condition = open_to_others(child(schema["if"], f"{path}/if"))
        if "then" not in schema and "else" not in schema:
            return ANY
        opposite = self._without(condition, so_far, f"{path}/if")
        then = child(schema.get("then", True), f"{path}/then")
        otherwise = child(schema.get("else", True), f"{path}/else")
        return union([intersect(condition, then, self), intersect(opposite, otherwise, self)])

    def _reference(self, target: Any, place: str) -> Reference:
        if not isinstance(target, str):
            refuse(place, "$ref must be a text")
        try:
            node = self._document.resolve(target, place)
        except InvalidRequestError:
            refuse(place, f"$ref to {target!r:.80}, which is not in this schema")
        self._wanted.setdefault(node.pointer, node.schema)
        return Reference(node.pointer)
