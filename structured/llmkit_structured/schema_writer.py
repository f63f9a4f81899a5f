"""Forms → JSON schema again, in plain words: no keyword beside one that it has to be combined with, every reference a
definition of the root, patterns that match whole strings. For libraries that read JSON schema, each with its gaps."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

from llmkit_structured.regex_tree import pattern
from llmkit_structured.schema_form import (
    ANY,
    NOTHING,
    Array,
    Boolean,
    Form,
    Literal,
    Null,
    Number,
    Object,
    Reference,
    String,
)
from llmkit_structured.schema_reader import ReadSchema
from llmkit_structured.schema_refusal import refuse

Schema = dict[str, Any]
Written = Schema | bool


class SchemaWriter:
    """Writes one schema. A subclass may write single forms in another way, or refuse them.

    forbid_undeclared: objects that say nothing of further properties get none.
    """

    def __init__(self, schema: ReadSchema, *, forbid_undeclared: bool = False) -> None:
        self._schema = schema
        self._forbid_undeclared = forbid_undeclared
        self._names = {name: f"d{i}" for i, name in enumerate(schema.definitions)}

    def document(self) -> Schema:
        """The whole schema."""
        written = self.write(self._schema.root)
        assert isinstance(written, dict), "a schema that no value meets is not read"
        definitions = {self._names[name]: self.write(form) for name, form in self._schema.definitions.items()}
        return {**written, "$defs": definitions} if definitions else written

    def write(self, form: Form) -> Written:
        """The schema of one form."""
        if form == ANY:
            return {}
        if form == NOTHING:
            return False
        if isinstance(form, Reference):
            return {"$ref": f"#/$defs/{self._names[form.name]}"}
        if isinstance(form, Null):
            return {"type": "null"}
        if isinstance(form, Boolean):
            return {"type": "boolean"}
        if isinstance(form, Literal):
            return {"const": form.value}
        writers: dict[type, Callable[[Any], Schema]] = {
            Number: self.number,
            String: self.string,
            Array: self.array,
            Object: self.object,
        }
        writer = writers.get(type(form))
        return writer(form) if writer is not None else self.union(getattr(form, "options", ()))

    def union(self, options: tuple[Form, ...]) -> Schema:
        """One of several forms; literals are put together."""
        literals = [option.value for option in options if isinstance(option, Literal)]
        others = [self.write(option) for option in options if not isinstance(option, Literal)]
        if not others:
            return {"enum": literals}
        return {"anyOf": [*others, *([{"enum": literals}] if literals else [])]}

    def number(self, form: Number) -> Schema:
        written: Schema = {"type": "integer" if form.integer else "number"}
        if form.low is not None:
            written["exclusiveMinimum" if form.low_open else "minimum"] = plain(form.low)
        if form.high is not None:
            written["exclusiveMaximum" if form.high_open else "maximum"] = plain(form.high)
        if form.multiple_of is not None:
            written["multipleOf"] = plain(form.multiple_of)
        return written

    def string(self, form: String) -> Schema:
        written: Schema = {"type": "string"}
        if form.low:
            written["minLength"] = form.low
        if form.high is not None:
            written["maxLength"] = form.high
        patterns = [f"^(?:{pattern(one.tree)})$" for one in form.patterns]
        if len(patterns) == 1:
            written["pattern"] = patterns[0]
        elif patterns:
            written["allOf"] = [{"type": "string", "pattern": one} for one in patterns]
        return written

    def array(self, form: Array) -> Schema:
        if form.unique and (form.high is None or form.high > 1):
            refuse("#", "uniqueItems is not supported")
        written: Schema = {"type": "array"}
        if form.prefix:
            written["prefixItems"] = [self.write(item) for item in form.prefix]
        if form.rest is not None:
            written["items"] = self.write(form.rest)
        if form.low:
            written["minItems"] = form.low
        if form.high is not None:
            written["maxItems"] = form.high
        return written

    def object(self, form: Object) -> Schema:
        written: Schema = {"type": "object"}
        properties = dict(form.properties)
        for name in form.required:
            properties.setdefault(name, form.form_of_others())
        if properties:
            written["properties"] = {name: self.write(of) for name, of in properties.items()}
        if form.required:
            written["required"] = list(form.required)
        rest = NOTHING if form.open_by_silence and self._forbid_undeclared else form.rest
        if rest is not None:
            written["additionalProperties"] = self.write(rest)
        if form.low > len(form.required):
            written["minProperties"] = form.low
        if form.high is not None:
            written["maxProperties"] = form.high
        return written


def plain(value: Decimal) -> int | float:
    """A number for JSON text: whole ones without a point."""
    return int(value) if value == value.to_integral_value() else float(value)
