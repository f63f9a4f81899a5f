"""Forms of JSON schema → context-free grammars in EBNF, exactly.

Values nest as deep as they like. Properties come in the order of the schema, further ones behind them. Numbers and
strings are regular languages; what no value of finite size meets is left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from llmkit_structured import ebnf_text
from llmkit_structured.ebnf_members import MAX_RULES, Members, repeated
from llmkit_structured.ebnf_text import literal
from llmkit_structured.json_numbers import number_tree
from llmkit_structured.json_strings import content_of, in_quotes, other_names
from llmkit_structured.regex_tree import Tree
from llmkit_structured.schema_form import (
    ANY,
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
    exact_number,
)
from llmkit_structured.schema_reader import ReadSchema
from llmkit_structured.schema_refusal import refuse
from llmkit_structured.schema_solve import whole_bounds

MAX_MULTIPLES = 4_096
MAX_REMAINDERS = 512
MAX_COUNTED = 32
"""Longest string that may hold escapes although its length is limited: each character takes the library about 10 ms. Of
longer ones it counts plain characters only, which costs nothing."""

# Sets of what is not in them are quick in the library, others are slow. An escape of half a surrogate pair is no
# character.
_PLAIN = "[^\\u0000-\\u001f\\u0022\\u005c\\ud800-\\udfff]"
_STRING_RULES = f"""\
string ::= "\\u0022" string_rest
string_rest ::= "\\u0022" | {_PLAIN} string_rest | "\\u005c" escape string_rest
escape ::= [\\u0022\\u005c\\u002fbfnrt] | "u" code
code ::= [0-9a-cA-CeEfF] hex hex hex | [dD] [0-7] hex hex | [dD] [89abAB] hex hex "\\u005cu" [dD] [c-fC-F] hex hex
hex ::= [0-9a-fA-F]
"""


@dataclass(frozen=True)
class Blanks:
    """What may stand between the tokens of JSON, as expressions: `gap` around brackets and before punctuation, `colon`
    and `comma` with what follows them."""

    gap: str
    colon: str
    comma: str


FIXED = Blanks('""', '":" " "?', '"," " "?')
NONE = Blanks('""', '":"', '","')


def schema_rules(schema: ReadSchema, spacing: Blanks | str) -> str:
    """The grammar of the JSON texts of `schema`, with the rule `root`. spacing: what may stand between the tokens of
    JSON; an expression: that, wherever blanks are allowed. Raises UnsupportedSchema."""
    if isinstance(spacing, Blanks):
        return _Writer(schema, spacing).grammar("")
    return _Writer(schema, Blanks("gap", 'gap ":" gap', 'gap "," gap')).grammar(f"gap ::= {spacing}\n")


class _Writer:
    def __init__(self, schema: ReadSchema, spacing: Blanks) -> None:
        self._schema = schema
        self._spacing = spacing
        self._rules: list[str] = []
        self._names: dict[Form, str] = {}
        self._left: dict[tuple[int, int], str] = {}
        self._finite = _finite_names(schema)
        self._defined = {name: f"d{i}" for i, name in enumerate(schema.definitions)}

    def grammar(self, gap: str) -> str:
        root = self._form(self._schema.root)
        if root is None:
            refuse("#", "no value of finite size meets the schema")
        for name, form in self._schema.definitions.items():
            body = self._form(form) if name in self._finite else None
            if body is not None:
                self._rules.append(f"{self._defined[name]} ::= {body}")
        return "\n".join([f"root ::= {root}", *self._rules, gap + _STRING_RULES])

    def _rule(self, body: str) -> str:
        """The name of a new rule."""
        if len(self._rules) >= MAX_RULES:
            refuse("#", "the schema is too large")
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name} ::= {body}")
        return name

    def _form(self, form: Form) -> str | None:
        """An expression for the texts of `form`; None if no finite value is of it."""
        if isinstance(form, Null):
            return '"null"'
        if isinstance(form, Boolean):
            return '("true" | "false")'
        if isinstance(form, Reference):
            return self._defined[form.name] if form.name in self._finite else None
        if form == String():
            return "string"
        if isinstance(form, Literal):
            return self._value(form.value)
        known = self._names.get(form)
        if known is None:
            self._names[form] = known = self._new(form)
        return known or None

    def _new(self, form: Form) -> str:
        """The name of the rule of `form`, "" if there is none."""
        if form == ANY:
            # It contains itself: the name has to be there first.
            self._names[form] = "any"
            parts = [self._form(option) for option in getattr(form, "options", ())]
            self._rules.append("any ::= " + " | ".join(part for part in parts if part is not None))
            return "any"
        if isinstance(form, Union):
            options = [part for option in form.options if (part := self._form(option)) is not None]
            return self._rule(" | ".join(options)) if options else ""
        if isinstance(form, Number):
            return self._rule(self._number(form))
        if isinstance(form, String):
            return self._rule(self._string(form))
        body = None
        if isinstance(form, Array):
            body = self._array(form)
        elif isinstance(form, Object):
            body = self._object(form)
        return "" if body is None else self._rule(body)

    # ---- values without parts

    def _tree(self, tree: Tree) -> str:
        try:
            return ebnf_text.expression(tree)
        except ValueError:
            refuse("#", "no value meets the schema")

    def _string(self, form: String) -> str:
        if form.patterns:
            return self._tree(in_quotes(content_of(form)))
        if form.high is None:
            return f'"\\u0022" {_PLAIN}{{{form.low}}} string_rest'
        if form.high <= MAX_COUNTED:
            return f'"\\u0022" {self._counted(form.low, form.high)}'
        return f'"\\u0022" {_PLAIN}{{{form.low},{form.high}}} "\\u0022"'

    def _counted(self, low: int, high: int) -> str:
        """The rule of `low` to `high` characters and a quote: a state for each number that is left, shared by all."""
        for length in range(high + 1):
            least = max(0, low - (high - length))
            if (least, length) not in self._left:
                options = ['"\\u0022"'] if least == 0 else []
                if length:
                    after = self._left[max(0, least - 1), length - 1]
                    options += [f"{_PLAIN} {after}", f'"\\u005c" escape {after}']
                self._left[least, length] = self._rule(" | ".join(options))
        return self._left[low, high]

    def _number(self, form: Number) -> str:
        tree = number_tree(form)
        if tree is not None:
            return self._tree(tree)
        step = form.multiple_of
        assert step is not None
        if step == step.to_integral_value() and (form.low is None) == (form.high is None):
            whole = int(step)
            low, high = whole_bounds(form)
            if low is not None and high is not None and (high - low) // whole < MAX_MULTIPLES:
                multiples = range(-(-low // whole) * whole, high + 1, whole)
                return " | ".join(f'"{value}"' for value in multiples) or refuse("#", "no value meets the schema")
            if low is None and whole <= MAX_REMAINDERS:
                return self._multiples(whole)
        refuse("#", f"multipleOf {step} is not supported with these bounds")

    def _multiples(self, step: int) -> str:
        """Whole multiples of `step`: a state for each remainder of the digits so far."""
        start = len(self._rules)
        for remainder in range(step):
            steps = [f'"{digit}" r{start + (10 * remainder + digit) % step}' for digit in range(10)]
            self._rule(" | ".join([*(['""'] if remainder == 0 else []), *steps]))
        first = " | ".join(f'"{digit}" r{start + digit % step}' for digit in range(1, 10))
        return f'"0" | "-"? ({first})'

    def _value(self, value: Any) -> str:
        if isinstance(value, (bool, str)) or value is None:
            return _written(value)
        if isinstance(value, (int, float)):
            exact = exact_number(value)
            if exact == exact.to_integral_value() and abs(exact.adjusted()) < 25:
                return f'"{int(exact)}"'
            return literal(json.dumps(value))
        if isinstance(value, list):
            return self._inside("[", self._joined([self._value(item) for item in value]), "]")
        members = [f"{_written(name)} {self._spacing.colon} {self._value(item)}" for name, item in value.items()]
        return self._inside("{", self._joined(members), "}")

    # ---- arrays and objects

    def _inside(self, opening: str, content: str, closing: str) -> str:
        gap = self._spacing.gap
        filled = f"{gap} {content} " if content else ""
        return f'"{opening}" {filled}{gap} "{closing}"'

    def _joined(self, items: list[str]) -> str:
        return f" {self._spacing.comma} ".join(items)

    def _array(self, form: Array) -> str | None:
        if form.unique and (form.high is None or form.high > 1):
            refuse("#", "uniqueItems is not supported")
        low, high = form.low, form.high
        items = [self._form(item) for item in form.prefix]
        possible = items.index(None) if None in items else len(items)
        rest = self._form(ANY if form.rest is None else form.rest) if possible == len(items) else None
        longest = possible if rest is None else high
        if high is not None:
            longest = high if longest is None else min(longest, high)
        if longest is not None and longest < low:
            return None
        if longest == 0:
            return self._inside("[", "", "]")
        content = self._items([item for item in items if item is not None][:possible], rest, low, longest)
        return self._optional_inside("[", content, "]", empty=low == 0, filled=longest != 0)

    def _items(self, first: list[str], rest: str | None, low: int, high: int | None) -> str:
        """`low` to `high` items, at least one."""
        comma = self._spacing.comma
        if high is not None:
            first = first[:high]
        tail = ""
        if rest is not None and (high is None or high > len(first)):
            least, most = max(0, low - len(first)), None if high is None else high - len(first)
            if not first:
                return f"{rest} {repeated(f'{comma} {rest}', max(0, least - 1), None if most is None else most - 1)}"
            tail = repeated(f"{comma} {rest}", least, most)
        for i in range(len(first) - 1, 0, -1):
            body = f"{comma} {first[i]} {tail}"
            tail = body if i < low else f"({body})?"
            if i % 8 == 0:
                tail = self._rule(tail)  # instead of brackets in brackets without end
        return f"{first[0]} {tail}"

    def _optional_inside(self, opening: str, content: str, closing: str, *, empty: bool, filled: bool) -> str:
        gap = self._spacing.gap
        nothing = f'"{opening}" {gap} "{closing}"'
        if not filled:
            return nothing
        something = f'"{opening}" {gap} {content} {gap} "{closing}"'
        return f"{something} | {nothing}" if empty else something

    def _object(self, form: Object) -> str | None:
        properties = dict(form.properties)
        for name in form.required:
            properties.setdefault(name, form.form_of_others())
        members: list[tuple[str, bool]] = []
        for name, of in properties.items():
            value = self._form(of)
            if value is None and name in form.required:
                return None
            if value is not None:
                members.append((f"{_written(name)} {self._spacing.colon} {value}", name in form.required))
        other = None if form.open_by_silence else self._form(form.form_of_others())
        if other is not None:
            name_text = self._tree(in_quotes(other_names(properties))) if properties else "string"
            other = f"{name_text} {self._spacing.colon} {other}"
        content = Members(self._rule, self._spacing.comma, members, other, form.low, form.high).first()
        if content is None:
            refuse("#", f"minProperties {form.low} is not supported: names that the schema does not list may repeat")
        empty, filled = content
        return self._optional_inside("{", filled, "}", empty=empty, filled=bool(filled))


def _written(value: str | bool | None) -> str:
    """Exactly the JSON text of `value`."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        refuse("#", "a text with half of a surrogate pair")
    return literal(text)


def _finite_names(schema: ReadSchema) -> frozenset[str]:
    """The definitions that some value of finite size meets: the least set that is closed under what they need."""
    finite: set[str] = set()
    while True:
        more = {name for name, form in schema.definitions.items() if name not in finite and _is_finite(form, finite)}
        if not more:
            return frozenset(finite)
        finite |= more


def _is_finite(form: Form, finite: set[str]) -> bool:
    if isinstance(form, Reference):
        return form.name in finite
    if isinstance(form, Union):
        return any(_is_finite(option, finite) for option in form.options)
    if isinstance(form, Array):
        needed = [*form.prefix[: form.low], *([form.rest] if form.rest and form.low > len(form.prefix) else [])]
        return all(_is_finite(item, finite) for item in needed)
    if isinstance(form, Object):
        return all(_is_finite(form.form_of(name), finite) for name in form.required)
    return True
