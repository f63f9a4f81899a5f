"""Forms of JSON schema → regular languages of JSON text, for engines that know nothing but regular expressions.

What no regular expression can say is cut to a bound that the caller gives: references into themselves, and values of
any kind, are unfolded `max_depth` times; a text that nests deeper is not of the language. Properties come in the order
of the schema; objects that say nothing of further properties have none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from llmkit.grammars.effort import spend
from llmkit_structured.json_numbers import number_tree
from llmkit_structured.json_strings import content_of, in_quotes, other_names
from llmkit_structured.regex_tree import (
    EMPTY,
    NOTHING,
    Tree,
    choice,
    optional,
    repeat,
    sequence,
    size,
    text,
)
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
from llmkit_structured.schema_solve import recursive_names

MAX_SIZE = 200_000
"""Characters of a tree, repetitions written out, beyond which no engine would finish."""


@dataclass(frozen=True)
class Layout:
    """What may stand between the tokens of JSON: around brackets and before punctuation `gap`; after it `colon`,
    `comma`, punctuation included."""

    gap: Tree
    colon: Tree
    comma: Tree


FIXED = Layout(EMPTY, sequence([text(":"), optional(text(" "))]), sequence([text(","), optional(text(" "))]))
"""At most one space, after colon and comma: compact, and as most programs write it on one line."""


def layout(gap: Tree) -> Layout:
    """`gap` wherever JSON allows blanks."""
    return Layout(gap, sequence([gap, text(":"), gap]), sequence([gap, text(","), gap]))


def json_text(schema: ReadSchema, max_depth: int, spacing: Layout = FIXED) -> Tree:
    """The JSON texts of the values that meet `schema`. Raises UnsupportedSchema."""
    tree = _Writer(schema, spacing).tree(schema.root, max_depth)
    if tree == NOTHING:
        refuse("#", f"no value that nests at most {max_depth} deep meets the schema")
    return tree


class _Writer:
    def __init__(self, schema: ReadSchema, spacing: Layout) -> None:
        self._definitions = schema.definitions
        self._spacing = spacing
        self._literal_size = 0
        self._recursive = recursive_names(schema.definitions)
        self._cached = cache(self._tree)

    def tree(self, form: Form, depth: int) -> Tree:
        """The texts of `form`; depth: how often a reference, or a value of any kind, may still be unfolded."""
        spend()
        tree = self._cached(form, depth)
        if size(tree) > MAX_SIZE:
            refuse("#", "the schema is too large for a regular expression")
        return tree

    def _tree(self, form: Form, depth: int) -> Tree:
        if isinstance(form, Null):
            return text("null")
        if isinstance(form, Boolean):
            return choice([text("true"), text("false")])
        if isinstance(form, Number):
            return self._number(form)
        if isinstance(form, String):
            return in_quotes(content_of(form))
        if isinstance(form, Literal):
            return self._value(form.value)
        if isinstance(form, Union):
            return choice(self.tree(option, depth) for option in form.options)
        if isinstance(form, Reference):
            left = depth - 1 if form.name in self._recursive else depth
            return NOTHING if left < 0 else self.tree(self._definitions[form.name], left)
        if isinstance(form, Array):
            return self._array(form, depth)
        return self._object(form, depth)

    def _written(self, literal: str) -> Tree:
        """Exactly `literal`; the characters are counted before the tree is made."""
        self._literal_size += len(literal)
        if self._literal_size > MAX_SIZE:
            refuse("#", "the schema is too large for a regular expression")
        return text(literal)

    def _number(self, form: Number) -> Tree:
        tree = number_tree(form)
        if tree is None:
            refuse("#", f"multipleOf {form.multiple_of} is not supported, only powers of ten without bounds are")
        return tree

    def _inside(self, opening: str, content: Tree, closing: str) -> Tree:
        return sequence([text(opening), self._spacing.gap, content, text(closing)])

    def _any(self, form: Form | None, depth: int) -> Tree:
        """The texts of what stands in an array or object; None: a value of any kind, one level less deep."""
        if form is not None:
            return self.tree(form, depth)
        return NOTHING if depth <= 0 else self.tree(ANY, depth - 1)

    def _array(self, form: Array, depth: int) -> Tree:
        if form.unique and (form.high is None or form.high > 1):
            refuse("#", "uniqueItems is not supported")
        fixed = [self.tree(item, depth) for item in form.prefix]
        rest = self._any(form.rest, depth)
        longest = len(fixed) if form.high is None else min(len(fixed), form.high)
        options = [self._joined(fixed[:count]) for count in range(form.low, longest + 1)]
        least = max(form.low - len(fixed), 1)
        most = None if form.high is None else form.high - len(fixed)
        if rest != NOTHING and (most is None or most >= least):
            following = repeat(sequence([self._spacing.comma, rest]), least - 1, None if most is None else most - 1)
            options.append(self._joined([*fixed, sequence([rest, following])]))
        gap = self._spacing.gap
        filled = choice(sequence([option, gap]) if option != EMPTY else EMPTY for option in options)
        return self._inside("[", filled, "]") if options else NOTHING

    def _joined(self, items: list[Tree]) -> Tree:
        parts: list[Tree] = []
        for item in items:
            parts += [self._spacing.comma, item] if parts else [item]
        return sequence(parts)

    def _object(self, form: Object, depth: int) -> Tree:
        properties, required = dict(form.properties), set(form.required)
        for name in form.required:
            properties.setdefault(name, form.form_of_others())
        written: list[tuple[Tree, bool]] = []
        for name, of in properties.items():
            value = self._any(None if of == ANY else of, depth)
            member = sequence([self._written(json.dumps(name, ensure_ascii=False)), self._spacing.colon, value])
            if member != NOTHING or name in required:
                written.append((member, name in required))
        others: Tree = NOTHING
        if not form.open_by_silence:
            name_tree = in_quotes(other_names(properties))
            others = sequence([name_tree, self._spacing.colon, self._any(form.rest, depth)])
        return self._inside("{", self._members(form, written, others), "}")

    def _members(self, form: Object, written: list[tuple[Tree, bool]], others: Tree) -> Tree:
        count = len(form.required)
        fewest, most = form.low, form.high
        if others == NOTHING and most is not None and most >= len(written):
            most = None
        if fewest <= count and most is None:
            return self._in_order(written, repeat(sequence([self._spacing.comma, others]), 0, None), others)
        if fewest > 1 + count or (fewest > count and count > 0):
            refuse("#", f"minProperties {fewest} is not supported: names may repeat")
        if most is not None and written and len(written) != count:
            refuse("#", f"maxProperties {most} beside optional properties is not supported")
        left = None if most is None else max(0, most - count)
        if not written:
            least = min(fewest, 1)
            if left == 0:
                return EMPTY
            following = repeat(sequence([self._spacing.comma, others]), 0, None if left is None else left - 1)
            some = sequence([others, following, self._spacing.gap])
            return some if least else choice([EMPTY, some])
        if fewest <= count:
            return self._in_order(written, repeat(sequence([self._spacing.comma, others]), 0, left), others)
        return self._in_order(written, repeat(sequence([self._spacing.comma, others]), 0, None), others, empty=False)

    def _in_order(self, written: list[tuple[Tree, bool]], tail: Tree, others: Tree, *, empty: bool = True) -> Tree:
        """The members in their order, optional ones left out or not, then `tail`: further ones, a comma before each."""
        comma, gap = self._spacing.comma, self._spacing.gap
        ending = sequence([tail, gap])
        last = max((i for i, (_, needed) in enumerate(written) if needed), default=None)
        if last is not None:
            parts: list[Tree] = []
            for i, (member, needed) in enumerate(written):
                part = member if i == last else sequence([member, comma] if i < last else [comma, member])
                parts.append(part if needed else optional(part))
            return sequence([*parts, ending])
        if sum(size(member) for member, _ in written) * len(written) > 2 * MAX_SIZE:
            refuse("#", "so many optional properties are too large for a regular expression")
        options: list[Tree] = []
        for i, (member, _) in enumerate(written):
            following = [optional(sequence([comma, later])) for later, _ in written[i + 1 :]]
            options.append(sequence([member, *following, ending]))
        options.append(sequence([others, ending]))
        return choice([*options, *([EMPTY] if empty else [])])

    def _value(self, value: Any) -> Tree:
        if isinstance(value, (bool, str)) or value is None:
            return self._written(json.dumps(value, ensure_ascii=False))
        if isinstance(value, (int, float)):
            exact = exact_number(value)
            if exact == exact.to_integral_value() and abs(exact.adjusted()) < 25:
                return sequence([self._written(str(int(exact))), optional(text(".0"))])
            return self._written(json.dumps(value))
        gap = self._spacing.gap
        if isinstance(value, list):
            items = self._joined([self._value(item) for item in value])
            return self._inside("[", sequence([items, gap]) if value else EMPTY, "]")
        members = [
            sequence([self._written(json.dumps(name, ensure_ascii=False)), self._spacing.colon, self._value(item)])
            for name, item in value.items()
        ]
        return self._inside("{", sequence([self._joined(members), gap]) if value else EMPTY, "}")
