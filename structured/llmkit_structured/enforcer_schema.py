"""Requests → parsers of lm-format-enforcer, or the reason why not.

The library passes over what it does not know, and takes some of what it knows for something else; so it is given only
schemas in the few words that it reads as they are meant. Its parsers see characters; a character that nothing in the
request tells from others is put for all of those, which keeps their alphabets small.
"""

from __future__ import annotations

import json
from typing import Any

from llmkit_structured.json_strings import PLAIN, content_of
from llmkit_structured.regex_tree import NOTHING as NO_TEXT
from llmkit_structured.regex_tree import Tree, alphabet_misses
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
    Union,
    union,
)
from llmkit_structured.schema_reader import ReadSchema
from llmkit_structured.schema_refusal import refuse
from llmkit_structured.schema_solve import whole_bounds

MAX_LISTED_INTEGERS = 256
Schema = dict[str, Any]


class EnforcerWriter:
    """Writes one schema for the library.

    patterns: name → language of the strings that the schema refers to by that name as `pattern`. texts: every text
    that the library compares characters with. has_integers, has_longest: whether the schema has integers, or strings
    with a greatest length.
    """

    def __init__(self, schema: ReadSchema) -> None:
        self._schema = schema
        self._names = {name: f"d{i}" for i, name in enumerate(schema.definitions)}
        self.patterns: dict[str, Tree] = {}
        self.texts: list[str] = []
        self.has_integers = False
        self.has_longest = False

    def document(self) -> Schema:
        """The whole schema. Raises UnsupportedSchema."""
        written = self.write(self._schema.root)
        definitions = {self._names[name]: self.write(form) for name, form in self._schema.definitions.items()}
        return {**written, "$defs": definitions} if definitions else written

    def write(self, form: Form) -> Schema:
        """The schema of one form."""
        if isinstance(form, Reference):
            return {"$ref": f"#/$defs/{self._names[form.name]}"}
        if isinstance(form, Union):
            return self._union(form)
        if isinstance(form, Null):
            return {"type": "null"}
        if isinstance(form, Boolean):
            return {"type": "boolean"}
        if isinstance(form, Literal):
            return self._literals([form.value])
        if isinstance(form, Number):
            return self._number(form)
        if isinstance(form, String):
            return self._string(form)
        return self._array(form) if isinstance(form, Array) else self._object(form)

    def _union(self, form: Union) -> Schema:
        options = self._flat(form)
        if not options:
            refuse("#", "a place where no value is allowed")
        literals = [option for option in options if isinstance(option, Literal)]
        others = [option for option in options if not isinstance(option, Literal)]
        strings, arrays = ([o for o in others if isinstance(o, kind)] for kind in (String, Array))
        if len(strings) > 1 or len(arrays) > 1:
            refuse("#", "alternatives of which several are strings, or several are arrays")
        if strings and any(isinstance(option.value, str) for option in literals):
            refuse("#", "alternatives of which one is a text and another any text")
        written = [self.write(option) for option in others]
        groups: dict[type, list[Any]] = {}
        for value in [option.value for option in literals]:
            groups.setdefault(float if type(value) is int else type(value), []).append(value)
        written += [self._literals(values) for values in groups.values()]
        return written[0] if len(written) == 1 else {"anyOf": written}

    def _flat(self, form: Union) -> list[Form]:
        """The options, with those of unions among them; the library cannot nest alternatives."""
        found: list[Form] = []
        for option in form.options:
            target = self._schema.definitions[option.name] if isinstance(option, Reference) else option
            found.extend(self._flat(target) if isinstance(target, Union) else [target])
        flat = union(found)
        return list(flat.options) if isinstance(flat, Union) else [flat]

    def _literals(self, values: list[Any]) -> Schema:
        """Values of one type."""
        if values == [None]:
            return {"type": "null"}
        if all(isinstance(value, bool) for value in values):
            if set(values) != {True, False}:
                refuse("#", "true or false alone")
            return {"type": "boolean"}
        if all(isinstance(value, str) for value in values):
            return {"type": "string", "enum": [self._text(value) for value in values]}
        if all(isinstance(value, (int, float)) for value in values):
            self.has_integers = True
            return {"enum": [int(value) if value == int(value) and abs(value) < 1e15 else value for value in values]}
        refuse("#", f"the constant {json.dumps(values[0])[:40]}, which is no text, number or truth value")

    def _text(self, value: str) -> str:
        """A text that is compared character by character: the library takes it as it stands between the quotes."""
        if any(character not in PLAIN for character in value) or value[:1].isspace():
            refuse("#", f"the text {value!r:.40}, which has characters that must be escaped, or begins with a blank")
        self.texts.append(value)
        return value

    def _number(self, form: Number) -> Schema:
        if form.multiple_of is not None:
            refuse("#", "multipleOf is not supported")
        self.has_integers |= form.integer
        if form.low is None and form.high is None:
            return {"type": "integer" if form.integer else "number"}
        low, high = whole_bounds(form)
        if not form.integer or low is None or high is None or high - low >= MAX_LISTED_INTEGERS:
            refuse("#", f"minimum and maximum, but for at most {MAX_LISTED_INTEGERS} integers, are not supported")
        return {"enum": list(range(low, high + 1))}

    def _string(self, form: String) -> Schema:
        if form.patterns:
            tree = content_of(form)
            if tree == NO_TEXT:
                refuse("#", f"{form.patterns[0].keyword} {form.patterns[0].source!r:.40}, which no string meets")
            if alphabet_misses(tree, PLAIN):
                refuse("#", f"{form.patterns[0].keyword} {form.patterns[0].source!r:.40}, which allows characters that "
                       "must be escaped")  # fmt: skip
            name = f"p{len(self.patterns)}"
            self.patterns[name] = tree
            return {"type": "string", "pattern": name}
        if form.high == 0:
            return {"type": "string", "enum": [""]}  # a greatest length of 0 is none to the library
        written: Schema = {"type": "string"}
        if form.low:
            written["minLength"] = form.low
        if form.high is not None:
            self.has_longest = True
            written["maxLength"] = form.high
        return written

    def _array(self, form: Array) -> Schema:
        if form.prefix:
            refuse("#", "prefixItems is not supported")
        if form.unique and (form.high is None or form.high > 1):
            refuse("#", "uniqueItems is not supported")
        if form.high == 0 or form.rest == NOTHING:
            refuse("#", "an array without any item")
        # Without `items`, and without `additionalProperties` below, the library takes values of any kind.
        written: Schema = {"type": "array"}
        if form.rest not in (None, ANY):
            written["items"] = self.write(form.form_of_others())
        if form.low:
            written["minItems"] = form.low
        if form.high is not None:
            written["maxItems"] = form.high
        return written

    def _object(self, form: Object) -> Schema:
        properties = {name: of for name, of in form.properties if of != NOTHING or name in form.required}
        closed = form.rest == NOTHING or form.open_by_silence
        if closed:
            for name in form.required:
                properties.setdefault(name, form.form_of_others())
        if form.low > len(form.required):
            refuse("#", f"minProperties {form.low} is not supported")
        if form.high is not None and not (closed and form.high >= len(properties)):
            refuse("#", f"maxProperties {form.high} is not supported")
        if form.properties and not closed:
            refuse("#", "additionalProperties beside properties is not supported")
        if closed:
            of_names = {self._text(name): self.write(of) for name, of in properties.items()}
            return {"type": "object", "properties": of_names, "required": list(form.required)}
        required = [self._text(name) for name in form.required]
        written: Schema = {"type": "object", "required": required}
        if form.rest not in (None, ANY):
            written["additionalProperties"] = self.write(form.form_of_others())
        return written
